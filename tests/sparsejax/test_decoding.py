"""The programs of generation: the sparse engine, and what prefill compiles to on a mesh."""

import re

import jax
import pytest

import pallas_kernels
import sparsejax
from sparsejax import Options, decoding
from sparsejax.generate import generate
from tests.sparsejax.test_generate import (
    attention,
    config,
    layer,
    prefill_arguments,
    prompts_of,
    random_params,
)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("mesh", [None, sparsejax.MeshConfig(data=2, fsdp=1, tensor=4)])
def test_the_sparse_engine_decodes_the_ids_of_the_dense_one(mesh):
    model = config(layer(attention()), vocab_size=64)
    arguments = (model, random_params(model), prompts_of(3, 9, 6))  # rows that do not divide
    mesh = None if mesh is None else sparsejax.make_mesh(mesh)
    with pallas_kernels.interpret():
        options = Options(implementation="triton")
        found = generate(*arguments, max_new_tokens=5, options=options, mesh=mesh)
    assert found == generate(*arguments, max_new_tokens=5)


@pytest.mark.parametrize("slots", [16, 40])
def test_prefill_writes_the_cache_by_copies_that_stay_on_their_device(slots):
    model = config(layer(attention(num_kv_heads=2)), vocab_size=64)
    arguments = prefill_arguments(model, rows=4, slots=slots)
    mesh = sparsejax.make_mesh(sparsejax.MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        program = decoding._prefill.lower(*arguments)  # pyright: ignore
    assert "scatter" not in program.as_text()
    text = str(program.compile().as_text())
    assert "scatter" not in text
    kinds = "all-gather|all-to-all|collective-permute"
    moved = re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", text)
    sizes = {int(n) for shape in moved for n in re.findall(r"\d+(?=[],])", shape.split("{")[0])}
    assert sizes  # parameters are moved, over fsdp
    assert not sizes & {16, slots}  # but nothing of the prompt's 16 tokens, and no cache
