"""The figures of studies: what is drawn where, and that labels can be read."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Annotation

from sparsejax.studies import plots, shallow_plots

ABOUT = {"device": "1 x card", "jax": "0"}


def notes(axes):
    return [child for child in axes.texts if isinstance(child, Annotation)]


def check_readable(axes):
    """All notes lie inside the frame, and no two upon one another."""
    axes.figure.canvas.draw()
    boxes = [note.get_window_extent() for note in notes(axes)]
    frame = axes.get_window_extent()
    for box in boxes:
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1
        assert frame.y0 <= box.y0 and box.y1 <= frame.y1
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def steps(losses):
    rows = []
    for k, ce in enumerate(losses):
        row = ABOUT | {"step": f"step number {k}", "ce": ce, "nnz": 40_000.0 / (k + 1)}
        for mode, ms in (("decode", 1.0 - 0.1 * k), ("prefill", 4.0 + k)):
            row |= {f"{mode}_ms": ms, f"{mode}_least": 0.9 * ms, f"{mode}_most": 1.2 * ms}
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("losses", "off"),
    [
        ([3.53, 3.38, 3.38, 3.71, 3.41, 5.61, 3.4055, 3.4], [5]),
        ([3.53, 3.38, 3.38, 3.71, 3.41, 3.9, 3.4055, 3.4], []),
        ([4.0, 4.0, 4.0], []),
        ([4.0, 9.0], []),
        ([4.0], []),
    ],
)
def test_a_loss_far_above_does_not_press_the_others_together(tmp_path, losses, off):
    figure = shallow_plots.plot_waterfall(steps(losses), tmp_path / "new" / "w.png")
    axes = figure.axes[2]
    check_readable(axes)
    inside = [k for k in range(len(losses)) if k not in off]
    _, dots, far, *_ = axes.lines
    np.testing.assert_allclose(dots.get_xydata(), [(k, losses[k]) for k in inside])
    np.testing.assert_array_equal(far.get_xdata(), off)
    low, high = axes.get_ylim()
    shown = [losses[k] for k in inside]
    if off:
        assert max(shown) - min(shown) > 0.5 * (high - low)
        # Nothing on the axis gives the far mark a value; its note does.
        break_at = axes.lines[3].get_ydata()[0]
        assert max(shown) < break_at < far.get_ydata()[0] < high
        assert max(axes.get_yticks()) < break_at
    texts = [note.get_text() for note in notes(axes)]
    assert texts[::2] == [
        f"{ce:.3f}" + ("\n(off the scale)" if k in off else "") for k, ce in enumerate(losses)
    ]
    assert texts[1::2] == [f"{40_000 / (k + 1):,.0f}" for k in range(len(losses))]
    assert (tmp_path / "new" / "w.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_of_time_has_its_spread(tmp_path):
    rows = steps([4.0, 3.9, 3.8])
    for axes, mode in zip(
        shallow_plots.plot_waterfall(rows, tmp_path / "w.png").axes,
        ("decode", "prefill"),
        strict=False,
    ):
        check_readable(axes)
        ms = np.array([r[f"{mode}_ms"] for r in [*rows, rows[-1]]])
        ends = [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in axes.patches]
        between = [sorted(pair) for pair in itertools.pairwise(ms[:3])]
        np.testing.assert_allclose(ends, [[0, ms[0]], *between, [0, ms[2]]])
        (bars,) = axes.collections
        drawn = np.array(bars.get_segments())
        np.testing.assert_allclose(drawn[..., 1], np.stack([0.9 * ms, 1.2 * ms], 1))
        change = [f"{100 * (b - a) / ms[0]:+.1f} %" for a, b in itertools.pairwise(ms[:3])]
        texts = [note.get_text() for note in notes(axes)]
        assert texts == [f"{ms[0]:.3g}", *change, f"{ms[2]:.3g}"]
        assert all(n.xy[1] >= 1.2 * now for n, now in zip(notes(axes), ms, strict=True))


def run(variant, l1, ce, nnz, seed, **more):
    key = {"variant": variant, "l1": l1, "revive": 0.0, "warmup": 0.0, "length": 1, "seed": seed}
    key |= more
    points = [(1, 9.0), (6, 4.8), (10, ce)]
    curve = [{"tokens": 1e6 * t, "held_out": c, "train": c - 0.1} for t, c in points]
    record = ABOUT | {"key": key, "name": f"{variant}-{l1:g}", "ce": ce, "nnz": nnz, "curve": curve}
    if variant != "silu":
        stats = [{"layer": i, "mean": nnz, "dead": 10 * i, "d_ff": 100} for i in range(2)]
        record["layer_stats"] = stats
        record["positions"] = [{"from": 0, "to": 0, "nnz": nnz}, {"from": 1, "to": 3, "nnz": nnz}]
    return record


def test_quality_has_a_point_per_coefficient_and_labels_beside_it(tmp_path):
    rows = []
    for seed, up in ((0, 0.0), (1, 0.1)):
        rows += [run("silu", 0.0, 4.25 + up, 2048.0, seed)]
        for l1, ce, nnz in ((1e-2, 4.5, 0.5), (1e-3, 4.2, 20.0), (0.0, 4.3, 300.0)):
            rows.append(run("relu", l1, ce + up, nnz, seed))
        rows.append(run("nongated", 1e-3, 4.1 + up, 30.0, seed))
        rows.append(run("relu", 1e-3, 4.2 + up, 22.0, seed, revive=0.1))
        rows.append(run("relu", 1e-3, 4.4 + up, 32.0, seed, warmup=0.2))
    loss, activity, dead, layers, _, curves = plots.plot_sparsity(rows, tmp_path / "s.png").axes
    check_readable(loss)
    assert [n.get_text() for n in notes(loss)] == ["0", "0.001", "0.01", "0.001", "0.001", "0.001"]
    found = {c.get_label(): c for c in loss.containers}
    want = {
        "SiLU": [(2048.0, 4.3)],
        "gated ReLU": [(300.0, 4.35), (20.0, 4.25), (0.5, 4.55)],
        "with revival": [(22.0, 4.25)],
        "with L1 warm-up": [(32.0, 4.45)],
        "not gated": [(30.0, 4.15)],
    }
    assert set(found) == set(want)
    for label, points in want.items():
        line, _, bars = found[label]
        np.testing.assert_allclose(line.get_xydata(), points)
        ends = [[(x, y - 0.05), (x, y + 0.05)] for x, y in points]
        np.testing.assert_allclose(bars[1].get_segments(), ends)
    # A family has one colour in all panels; without counts of neurons it is in the first alone.
    for axes in (activity, dead):
        drawn = {line.get_label(): line.get_color() for line in axes.lines}
        assert drawn == {k: found[k][0].get_color() for k in want if k != "SiLU"}
    np.testing.assert_allclose(dead.lines[0].get_ydata(), [5, 5, 5])  # 10 of 200
    assert layers.get_legend() is None
    # The beginning of training is left out, to the first point that is shown.
    assert curves.get_ylim()[1] == pytest.approx(4.1 + 1)
    assert curves.get_xlim()[0] == pytest.approx(0.9 * 6)


def test_a_way_to_fuse_has_one_colour(tmp_path):
    rows = []
    for family in ("parent", "cut", *shallow_plots._WAYS):
        for saved in (4, 8) if family in ("fuse", "remove") else (0,):
            row = ABOUT | {"family": family, "ce": 3.5 + saved, "saved": saved, "order_of": saved}
            if family in ("parent", "base", "fuse", "remove"):
                row |= {"decode_ms": 0.5, "decode_least": 0.4, "decode_most": 0.8}
            rows.append(row)
    windows = [{"length": 2, "count": k, "ce": 3.5 + k} for k in (0, 1)]
    loss, latency, parallel = shallow_plots.plot_fusion(rows, windows, tmp_path / "f.png").axes
    colors = {line.get_label(): to_hex(line.get_color()) for line in loss.lines}
    assert len(colors) == 11
    drawn = {c.get_label(): c for c in latency.containers}
    assert set(drawn) == {"base", "fuse", "remove"}
    for family, (line, _, (bars,)) in drawn.items():
        assert to_hex(line.get_color()) == colors[family]
        np.testing.assert_allclose(np.array(bars.get_segments())[0, :, 1], [0.4, 0.8])
    labels = [t.get_text() for t in latency.get_legend().get_texts()]
    assert labels[0] == "parent: 0.500" and "2 layers each" in str(
        [t.get_text() for t in parallel.get_legend().get_texts()]
    )


def test_speed_has_its_spread_and_says_how_many_layers_were_sparse(tmp_path):
    rows = []
    for variant, ms, ratio in (("dense_relu", 10.0, 1.0), ("sparse_relu", 8.0, 1.25)):
        for mode, sequences in (("train", 32), ("decode", 1)):
            row = ABOUT | {"variant": variant, "mode": mode, "sequences": sequences, "ms": ms}
            row |= {"ms_min": 0.5 * ms, "ms_max": 2 * ms, "ratio_to_fastest_dense": ratio}
            row |= {"checkpoint": "L1 1", "pruned": False, "nnz_seen": [3.0, 5.0]}
            rows.append(row | {"d_ff": [64, 64], "sparse_layers": 1.0, "energy_ratio": 0.9})
    speed, energy = plots.plot_speed(rows, tmp_path / "v.png").axes
    check_readable(speed)
    assert [bar.get_height() for bar in speed.patches] == [1.25, 1.25]
    assert [bar.get_height() for bar in energy.patches] == [0.9, 0.9]
    (bars,) = speed.collections
    np.testing.assert_allclose(np.array(bars.get_segments())[..., 1], [[5 / 16, 5.0]] * 2)
    assert [n.get_text() for n in notes(speed)] == ["1.25\n1/2"] * 2
    assert [t.get_text() for t in speed.get_xticklabels()] == ["train x 32", "decode x 1"]
    assert [t.get_text() for t in speed.get_legend().get_texts()] == ["L1 1 (nnz 4)"]


def test_picked_engines_stand_beside_those_that_choose(tmp_path):
    rows = []
    both = ("train", "decode")
    for variant, modes in (("dense_relu", both), ("sparse_relu", both), ("picked", ("train",))):
        for mode in modes:
            row = ABOUT | {"variant": variant, "mode": mode, "sequences": 8, "ms": 8.0}
            row |= {"ms_min": 7.0, "ms_max": 9.0, "ratio_to_fastest_dense": 1.25}
            row |= {"checkpoint": "L1 1", "pruned": False, "nnz_seen": [3.0, 5.0]}
            rows.append(row | {"d_ff": [64, 64], "sparse_layers": 1.0, "energy_ratio": 0.9})
    speed, energy = plots.plot_speed(rows, tmp_path / "v.png").axes
    check_readable(speed)
    for axes in (speed, energy):
        assert [bar.get_hatch() for bar in axes.patches] == [None, None, "///"]
        assert len({to_hex(bar.get_facecolor()) for bar in axes.patches}) == 1
    ends = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in speed.patches)
    np.testing.assert_allclose(np.ravel(ends), [-0.4, 0, 0, 0.4, 0.8, 1.2], atol=1e-12)
    texts = [t.get_text() for t in speed.get_legend().get_texts()]
    assert texts == ["L1 1 (nnz 4)", "L1 1, engines picked (nnz 4)"]
