"""Collectives read from HLO text: forms that XLA writes, and real programs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sparsejax import MeshConfig, make_mesh
from sparsejax.analysis.collectives import collectives, totals

HEAD = "HloModule m, num_partitions=8\n"


def one(line):
    (found,) = collectives(f"{HEAD}ENTRY %main () -> () {{\n  {line}\n}}\n")
    return found


@pytest.mark.parametrize(
    ("groups", "want"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("{}", (tuple(range(8)),)),
        ("[4,2]<=[8]", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
)
def test_groups(groups, want):
    found = one(f"%r = f32[4]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add")
    assert found.groups == want
    n = len(want[0])
    assert (found.size, found.ways, found.sent) == (16, n, 2 * (n - 1) / n * 16)


@pytest.mark.parametrize(
    ("line", "arrays", "sent"),
    [
        ("bf16[8,4]{1,0} all-gather(%x)", (("bf16", (8, 4)),), 64 * 7 / 8),
        ("(f32[1,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%x)", (("f32", (8, 4)),), 128 * 7 / 8),
        (
            "((bf16[1]{0}, f32[2,2]{1,0:T(8,128)}), (bf16[8]{0}, /*index=1*/f32[16,2]{1,0}))"
            " all-gather-start(%x, %y)",
            (("bf16", (8,)), ("f32", (16, 2))),
            (16 + 128) * 7 / 8,
        ),
        ("f32[3,2]{1,0} reduce-scatter(%x)", (("f32", (3, 16)),), 192 * 7 / 8),
        ("((f32[16]{0}), f32[2]{0}) reduce-scatter-start(%x)", (("f32", (16,)),), 64 * 7 / 8),
        ("(s32[2]{0}, pred[3]{0}) all-to-all(%x, %y)", (("s32", (2,)), ("pred", (3,))), 11 * 7 / 8),
        ("(f32[2]{0}, s32[]) all-reduce-start(%x, %y)", (("f32", (2,)), ("s32", ())), 12 * 14 / 8),
        ("((f32[2]{0}), f32[2]{0}) all-reduce-start(%x)", (("f32", (2,)),), 8 * 14 / 8),
        ("f8e4m3fn[5]{0} all-gather(%x)", (("f8e4m3fn", (5,)),), 5 * 7 / 8),
    ],
)
def test_arrays(line, arrays, sent):
    found = one(f"ROOT %r.1 = {line}, replica_groups={{}}, dimensions={{1}}")
    assert (found.name, found.arrays, found.sent) == ("r.1", arrays, sent)


def test_permutes_and_groups_of_one():
    line = "%p = f32[4]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0},{2,2}}"
    assert one(line).groups == ((0, 1), (1, 0))
    assert one(line).sent == 16
    alone = "%r = f32[4] all-reduce(%x), replica_groups={{0},{1}}"
    assert collectives(f"{HEAD}ENTRY %main () -> () {{\n  {alone}\n}}\n") == []


def test_what_cannot_be_read_is_an_error():
    with pytest.raises(ValueError, match=r"cannot read 'replica_groups=<new form>"):
        one("%r = f32[4] all-reduce(%x), replica_groups=<new form>")
    loop = """%body () -> () {
  %r = f32[4] all-reduce(%x), replica_groups={}
}
ENTRY %main () -> () {
  %w = () while(%x), condition=%c, body=%body
}
"""
    with pytest.raises(ValueError, match=r"a loop in main runs a collective in body"):
        collectives(HEAD + loop)


def test_a_compiled_program_with_a_loop():
    mesh = make_mesh(MeshConfig(2, 2, 2))

    def local(x, w):
        def body(c, _):
            return lax.psum(c @ w, "tensor"), None

        x, _ = lax.scan(body, x, None, length=5)
        return lax.all_gather(x, "fsdp", axis=0, tiled=True)

    with jax.set_mesh(mesh):
        f = jax.shard_map(
            local, in_specs=(P("fsdp"), P()), out_specs=P(None, None), check_vma=False
        )
        x, w = jnp.zeros((8, 4)), jnp.zeros((4, 4))
        found = collectives(jax.jit(f).lower(x, w).compile().as_text())
    want = [
        {"kind": "all-gather", "axes": "fsdp", "count": 1, "bytes": 128, "sent_bytes": 64.0},
        {"kind": "all-reduce", "axes": "tensor", "count": 5, "bytes": 320, "sent_bytes": 320.0},
    ]
    assert totals(found, mesh) == want
