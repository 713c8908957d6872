"""What the figure of measured scaling shows, read back from it."""

import numpy as np

from sparsejax.analysis.scaling_plots import plot_scaling


def row(variant, split, efficiency, share=0.0, exposed=0.0):
    devices = int(np.prod(split))
    shares = {"collective_share": share, "collective_exposed_share": exposed}
    return (
        {"variant": variant, "split": split, "devices": devices}
        | shares
        | {"efficiency": efficiency}
    )


def test_lines_start_at_one_device_of_their_variant():
    rows = [
        row("dense_silu", (1, 1, 1), 1.0),
        row("sparse_relu", (1, 1, 1), 1.0),
        row("dense_silu", (2, 1, 1), 0.9, 0.2, 0.1),
        row("sparse_relu", (2, 1, 1), 0.8, 0.3, 0.05),
        row("sparse_relu", (1, 2, 1), 0.7, None, None),
    ]
    efficiency, share = plot_scaling(rows).axes
    ends = {tuple(line.get_ydata()) for line in efficiency.lines}
    assert ends == {(1.0, 0.9), (1.0, 0.8), (1.0, 0.7)}
    assert all(list(line.get_xdata()) == [1, 2] for line in efficiency.lines)
    labels = {text.get_text() for text in share.get_legend().get_texts()}
    assert labels == {"dense_silu, data", "sparse_relu, data", "sparse_relu, fsdp"}
    shown = {line.get_label(): line.get_ydata()[-1] for line in share.lines}
    assert (shown["dense_silu, data"], shown["sparse_relu, data"]) == (0.2, 0.3)
    assert np.isnan(shown["sparse_relu, fsdp"])  # not traced: no point


def test_one_device_alone_is_a_point():
    efficiency, _ = plot_scaling([row("sparse_relu", (1, 1, 1), 1.0)]).axes
    assert [list(line.get_ydata()) for line in efficiency.lines] == [[1.0]]
