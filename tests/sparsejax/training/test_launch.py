"""What scripts print of a finished run's held-out text."""

from sparsejax.training.launch import held_out_line


def test_held_out_loss_is_told_with_its_number_of_tokens():
    found = {"ce": 2.34567, "tokens": 20480}
    told = "held-out: cross-entropy 2.3457 nats per token, over 20,480 tokens (--eval-batches)"
    assert held_out_line({"held_out": found}) == told
    kl = "nats per token, divergence from the teacher 0.1250, over"
    assert held_out_line({"held_out": found | {"kl": 0.125}}) == told.replace(
        "nats per token, over", kl
    )


def test_a_run_that_was_not_evaluated_has_no_such_line():
    assert held_out_line({"status": "stopped"}) is None
    assert held_out_line({"held_out": None}) is None
