"""The plan of a round: every image once an epoch, the same for every method."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsc.data.plan import (
    CROP_PADDING,
    ClientPlan,
    client_plan,
    cohort,
    cohort_size,
    steps_per_epoch,
)

repeatable = settings(max_examples=60, deadline=None, derandomize=True)


@repeatable
@given(
    st.integers(1, 70), st.integers(1, 3), st.integers(1, 20), st.integers(0, 99), st.integers(1, 9)
)
def test_each_epoch_counts_each_image_once(
    num_samples: int, epochs: int, batch_size: int, seed: int, round: int
) -> None:
    plan = client_plan(seed, round, 3, num_samples, epochs, batch_size)
    size = min(batch_size, num_samples)
    steps = -(-num_samples // size)
    assert plan.order.shape == (epochs, steps, size)
    assert plan.weight.shape == (steps, size)
    assert plan.shift.shape == (epochs, steps, size, 2)
    assert plan.flip.shape == (epochs, steps, size)
    counted = plan.weight.flatten() == 1
    assert int(counted.sum()) == num_samples
    assert set(plan.weight.flatten().tolist()) <= {0.0, 1.0}
    for order in plan.order.flatten(1):
        assert sorted(order[counted].tolist()) == list(range(num_samples))
        # The last batch is filled up from the start of the same epoch's order.
        fill = order[~counted]
        assert fill.tolist() == order[: len(fill)].tolist()
        assert not counted[:num_samples].logical_not().any()
    assert int(plan.shift.min()) >= 0
    assert int(plan.shift.max()) <= 2 * CROP_PADDING


def same(one: ClientPlan, other: ClientPlan) -> bool:
    return all(
        torch.equal(getattr(one, part), getattr(other, part))
        for part in ("order", "weight", "shift", "flip")
    )


def test_seed_round_and_client_fix_the_plan_and_nothing_else_does() -> None:
    plan = client_plan(5, 2, 7, 50, 2, 8)
    torch.manual_seed(1)
    client_plan(5, 1, 7, 50, 2, 8)  # what was drawn before does not matter
    assert same(plan, client_plan(5, 2, 7, 50, 2, 8))
    for other in ((6, 2, 7), (5, 3, 7), (5, 2, 8)):
        drawn = client_plan(*other, 50, 2, 8)
        assert not torch.equal(plan.order, drawn.order)
        assert not torch.equal(plan.shift, drawn.shift)
        assert not torch.equal(plan.flip, drawn.flip)


def test_epochs_have_orders_and_augmentations_of_their_own() -> None:
    plan = client_plan(0, 1, 0, 64, 3, 16)
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert not torch.equal(plan.order[a], plan.order[b])
        assert not torch.equal(plan.shift[a], plan.shift[b])
    assert plan.flip.float().mean().item() > 0.3
    assert plan.flip.float().mean().item() < 0.7
    assert plan.shift.unique().tolist() == list(range(2 * CROP_PADDING + 1))


def test_a_whole_batch_may_share_its_crop_and_flip() -> None:
    plan = client_plan(0, 1, 0, 70, 3, 16, "crop-flip-batch")
    assert plan.shift.shape == (3, 5, 16, 2)
    assert plan.flip.shape == (3, 5, 16)
    assert all(len(batch.unique(dim=0)) == 1 for batch in plan.shift.flatten(0, 1))
    assert all(len(batch.unique()) == 1 for batch in plan.flip.flatten(0, 1))
    assert len(plan.shift[:, :, 0].flatten(0, 1).unique(dim=0)) > 7  # of 15 batches
    assert torch.equal(plan.order, client_plan(0, 1, 0, 70, 3, 16).order)


def test_a_client_smaller_than_a_batch_has_one_batch_of_all_it_has() -> None:
    plan = client_plan(0, 1, 0, 5, 1, 64)
    assert plan.order.shape == (1, 1, 5)
    assert plan.weight.tolist() == [[1.0] * 5]


def test_a_client_with_one_image() -> None:
    plan = client_plan(0, 1, 0, 1, 2, 64)
    assert plan.order.tolist() == [[[0]], [[0]]]


def test_no_epochs_no_batches() -> None:
    assert client_plan(0, 0, 0, 10, 0, 4).order.shape[0] == 0


def test_steps_by_hand() -> None:
    assert [steps_per_epoch(n, 64) for n in (1, 63, 64, 65, 128, 129)] == [1, 1, 1, 2, 2, 3]


def test_cohort_sizes_by_hand() -> None:
    found = [cohort_size(10, share) for share in (1.0, 0.5, 0.04, 0.26, 0.9)]
    assert found == [10, 5, 1, 3, 9]
    assert cohort_size(1, 0.1) == 1
    assert cohort_size(100, 0.1) == 10


@repeatable
@given(st.integers(0, 99), st.integers(1, 99), st.integers(1, 30), st.data())
def test_cohorts(seed: int, round: int, num_clients: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, num_clients))
    chosen = cohort(seed, round, num_clients, size)
    assert len(set(chosen)) == size
    assert chosen == sorted(chosen)
    assert set(chosen) <= set(range(num_clients))
    assert chosen == cohort(seed, round, num_clients, size)


def test_cohorts_change_with_the_round_and_reach_everybody() -> None:
    drawn = [cohort(0, round, 20, 4) for round in range(1, 41)]
    assert len({tuple(chosen) for chosen in drawn}) > 30
    assert {k for chosen in drawn for k in chosen} == set(range(20))
    assert drawn != [cohort(1, round, 20, 4) for round in range(1, 41)]
