"""The programs of generation with the sparse engine."""

import pytest

import pallas_kernels
import sparsejax
from sparsejax import Options
from sparsejax.generate import generate
from tests.sparsejax.test_generate import attention, config, layer, prompts_of, random_params


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
