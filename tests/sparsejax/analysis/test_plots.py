"""What figures show: colours, lines and labels, read back from them."""

import numpy as np
import pytest

from sparsejax.analysis import BlockScores, Choice, Dependency, plots

NAN = float("nan")


def dependency(m, part="block"):
    matrix = np.full((m, m), np.nan)
    upper = np.triu_indices(m, 1)
    matrix[upper] = 2.0 ** -np.linspace(0, 12, len(upper[0]))
    return Dependency(matrix, np.zeros((m, m), int), 4096, part, 1.0)


def scores(widths=(64, 64, 48)):
    kl = {}
    for i, width in enumerate(widths):
        whole = Choice(True, width)
        kl[i] = {
            whole: 0.0,
            whole._replace(attention=False): 0.1 * (i + 1),
            whole._replace(d_ff=0): 0.5 * (i + 1),
            whole._replace(d_ff=16): 0.2 / (i + 1),
        }
    del kl[1][Choice(False, 64)]
    return BlockScores(kl, np.array([0.9, 0.95, 0.8]), np.array([1.0, 0.5, 2.0]), None, 512, 4.0)


def test_heat_map(tmp_path):
    found = dependency(5)
    figure = plots.plot_dependency(found, tmp_path / "new" / "m.png")
    axes, bar = figure.axes
    (image,) = axes.images
    shown = np.ma.filled(image.get_array().astype(float), np.nan)
    want = np.clip(found.matrix, 2.0**-9, 2.0**-1)
    np.testing.assert_array_equal(shown, want)
    assert (image.norm.vmin, image.norm.vmax) == (2.0**-9, 2.0**-1)
    # Equal ratios are equal steps of colour.
    np.testing.assert_allclose(image.norm([2.0**-9, 2.0**-5, 2.0**-1]), [0, 0.5, 1], atol=1e-12)
    np.testing.assert_allclose(bar.get_yticks(), 2.0 ** np.arange(-9, 0))
    figure.canvas.draw()
    assert [t.get_text() for t in bar.get_yticklabels()] == [f"$2^{{{e}}}$" for e in range(-9, 0)]
    assert axes.get_xlabel() == "layer measured" and axes.get_ylabel() == "layer removed"
    assert "4,096 tokens" in axes.get_title()
    assert (tmp_path / "new" / "m.png").read_bytes().startswith(b"\x89PNG")
    # A notebook asks for this, whether pyplot was imported or not.
    assert figure._repr_png_().startswith(b"\x89PNG")
    for part in ("attention", "ffn"):
        label = plots.plot_dependency(dependency(3, part)).axes[0].get_ylabel()
        assert label.lower() == f"{part} of layer removed"
    with pytest.raises(ValueError, match="low and high must be 0 < low < high"):
        plots.plot_dependency(found, low=0.5, high=0.1)


def test_lines_of_scores(tmp_path):
    axes = plots.plot_scores(scores(), tmp_path / "s.png").axes[0]
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    np.testing.assert_array_equal(lines.pop("attention removed"), [0.1, NAN, 0.1 * 3])
    np.testing.assert_array_equal(lines.pop("FFN removed"), [0.5, 1.0, 1.5])
    np.testing.assert_array_equal(lines.pop("FFN narrowed to 16"), [0.2, 0.1, 0.2 / 3])
    assert lines == {} and axes.get_yscale() == "log"
    assert (tmp_path / "s.png").stat().st_size > 1000


def test_lines_of_layers(tmp_path):
    upper, lower = plots.plot_layers(scores(), tmp_path / "l.png").axes
    np.testing.assert_allclose(upper.lines[0].get_ydata(), [0.1, 0.05, 0.2])
    np.testing.assert_array_equal(lower.lines[0].get_ydata(), [1.0, 0.5, 2.0])
    assert (tmp_path / "l.png").stat().st_size > 1000


@pytest.mark.parametrize("m", [0, 1, 2])
def test_little_to_show(m, tmp_path):
    plots.plot_dependency(dependency(m), tmp_path / "m.png")
    kl = {i: {Choice(True, 8): 0.0} for i in range(m)}
    empty = BlockScores(kl, np.ones(m), np.zeros(m), None, 1, 1.0)
    axes = plots.plot_scores(empty, tmp_path / "s.png").axes[0]
    assert not axes.lines
    plots.plot_layers(empty, tmp_path / "l.png")
