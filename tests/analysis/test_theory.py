"""The theorems' formulas against hand-worked values, and the estimates against plain autograd."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from fedsc import FedscError
from fedsc.analysis import theory
from fedsc.analysis.constants import Seen, mean_iterations, round_clients, see
from fedsc.analysis.reopen import engine_of, rebuild
from fedsc.analysis.theory import Constants
from fedsc.analysis.verdict import judge, theory_of
from fedsc.engines.sequential import Visit
from fedsc.federation import Federation
from fedsc.method import Client
from fedsc.report.runs import RunData, read_run

# M = 1, |C| = 2, B = 6: the prototype term is (3 · 0.5 · 2 · 6) / 2 = 9.
HAND = Constants(L1=4.0, L2=0.5, B=6.0, sigma2=12.0, eta=0.1, E=5.0, M=1, C=2)


def test_theorem_1_by_hand() -> None:
    """-(0.1 - 4·0.01/2)·5·36 + 4·5·0.01/2·12 + 5·0.1·9 = -14.4 + 1.2 + 4.5"""
    assert theory.round_change(HAND) == pytest.approx(-8.7)


def test_theorem_2_by_hand() -> None:
    """(2·2·36 - 2·3·0.5·2·6) / (4·2·(12 + 36)) = (144 - 36) / 384 = 9/32; B > 3·0.5·2/2 = 1.5"""
    assert theory.largest_step(HAND) == pytest.approx(9 / 32)
    assert theory.least_gradient(HAND) == pytest.approx(1.5)


def test_at_theorem_2s_largest_step_theorem_1_allows_no_descent() -> None:
    limit = dataclasses.replace(HAND, eta=theory.largest_step(HAND))
    assert theory.round_change(limit) == pytest.approx(0, abs=1e-12)
    assert theory.round_change(dataclasses.replace(HAND, eta=0.28)) < 0
    assert theory.round_change(dataclasses.replace(HAND, eta=0.29)) > 0


def test_theorem_2_has_no_step_size_for_a_small_gradient() -> None:
    assert theory.largest_step(dataclasses.replace(HAND, B=1.4)) < 0
    assert theory.largest_step(dataclasses.replace(HAND, B=1.6)) > 0


def test_theorem_3_by_hand() -> None:
    """xi > 9. For xi = 18: eta < (2·18·2 - 36) / (4·2·(18 + 12)) = 36/240 = 0.15; and with
    Omega1 = 2·4·5·0.01·12 = 4.8, Omega2 = 2·3·0.5·5·0.1·2·6 = 18 and L0 - L* = 3:
    R > 2·2·3 / (18·5·0.1·2·(2 - 0.4) - 22.8) = 12 / (28.8 - 22.8) = 2"""
    assert theory.least_xi(HAND) == pytest.approx(9)
    assert theory.largest_step_for(18, HAND) == pytest.approx(0.15)
    assert theory.rounds_needed(18, 3.0, HAND) == pytest.approx(2)


def test_theorem_3_fails_for_small_xi_whatever_the_step() -> None:
    assert theory.largest_step_for(8.9, HAND) < 0
    for eta in (1e-6, 1e-3, 0.1, 1.0):
        assert theory.rounds_needed(8.9, 3.0, dataclasses.replace(HAND, eta=eta)) is None
    assert theory.rounds_needed(18, 3.0, dataclasses.replace(HAND, eta=0.16)) is None


def run_with_losses(losses: list[float], schedule: str = "constant", **more: float) -> RunData:
    records = [{"round": n, "train_loss": {"ce": loss}} for n, loss in enumerate(losses, 1)]
    method = {"name": "fedsc", "schedule": schedule}
    spec = {"method": method, "momentum": 0.0, "weight_decay": 0.0, "rounds": len(losses), **more}
    return RunData(Path("run"), spec, records, True)


def test_the_bound_starts_from_the_loss_before() -> None:
    found = judge(run_with_losses([10.0, 9.0, 0.5]), HAND, xi=18.0, first_loss=3.0)
    assert found["observed"] == [10.0, 9.0, 0.5]
    assert found["bound"] == [None, pytest.approx(1.3), pytest.approx(0.3)]
    assert [row["holds"] for row in found["conditions"]] == [True] * 6
    assert any("above the bound in 2 of 2 rounds" in note for note in found["notes"])


def test_what_cannot_be_met_is_said() -> None:
    weak = dataclasses.replace(HAND, B=1.0)
    found = judge(run_with_losses([1.0, 0.9], momentum=0.9), weak, xi=1.0, first_loss=3.0)
    holds = {row["name"]: row["holds"] for row in found["conditions"]}
    assert not holds["Theorem 2: any step size at all"]
    assert not holds["Theorem 3: rounds"]
    assert holds["Theorem 3: descent"]
    said = " ".join(found["notes"])
    for words in ("cannot be met by any step size", "any ξ > 0", "plain SGD", "says nothing"):
        assert words in said


def test_weights_that_change_over_the_rounds_are_named() -> None:
    for schedule, said in (("constant", False), ("falling", True)):
        found = judge(run_with_losses([1.0, 0.9], schedule), HAND, xi=18.0, first_loss=3.0)
        words = f"weights of RPCL and CPDR are {schedule}"
        assert any(words in note for note in found["notes"]) == said


def test_a_bound_below_zero_is_named() -> None:
    found = judge(run_with_losses([1.0, 0.9]), HAND, xi=18.0, first_loss=3.0)
    assert found["bound"][1] < 0
    assert any("below 0 in 1 rounds" in note for note in found["notes"])


# Estimates ----------------------------------------------------------------------------------------


def visit_of(federation: Federation, batch_size: int) -> tuple[Visit, Seen]:
    """The largest client in the first round, where FedSC's loss is cross-entropy."""
    engine = engine_of(federation)
    engine.training = dataclasses.replace(engine.training, batch_size=batch_size)
    data = max(federation.clients, key=lambda client: client.num_samples)
    client = Client(torch.tensor(data.id), data.class_counts, {})
    model, message = federation.server["model"], federation.method.broadcast(federation.server)
    visit = Visit(engine, 1, data, client, model, message, lambda images: None)
    return visit, see(visit, model)


def gradient_of(visit: Visit, indices: torch.Tensor) -> torch.Tensor:
    images = visit.images.normalised(visit.images.images[indices])
    loss = F.cross_entropy(visit.model(images).logits, visit.images.labels[indices])
    grads = torch.autograd.grad(loss, list(visit.model.parameters()))
    return torch.cat([grad.flatten() for grad in grads]).double()


def test_one_batch_has_its_own_gradient_and_no_variance(run_folders: Path) -> None:
    visit, seen = visit_of(rebuild(read_run(run_folders / "fedsc-seed0")), batch_size=1000)
    expected = gradient_of(visit, visit.client_data.indices)
    torch.testing.assert_close(seen.gradient, expected, rtol=1e-4, atol=1e-6)
    assert seen.mean_norm == pytest.approx(float(expected.norm()), rel=1e-4)
    assert seen.variance == pytest.approx(0, abs=1e-9)


def test_the_variance_of_single_images(run_folders: Path) -> None:
    visit, seen = visit_of(rebuild(read_run(run_folders / "fedsc-seed0")), batch_size=1)
    order = torch.randperm(
        visit.client_data.num_samples, generator=torch.Generator().manual_seed(0)
    )
    each = torch.stack(
        [gradient_of(visit, visit.client_data.indices[k : k + 1]) for k in order[:20]]
    )
    mean = each.mean(0)
    assert seen.variance == pytest.approx(float((each - mean).square().sum(1).mean()), rel=1e-3)
    assert seen.mean_norm == pytest.approx(float(each.norm(dim=1).mean()), rel=1e-3)
    assert seen.gradient.norm() <= seen.mean_norm


def test_iterations_of_a_round(run_folders: Path) -> None:
    federation = rebuild(read_run(run_folders / "fedsc-seed0"))
    expected = sum(
        2 * client.num_samples * -(-client.num_samples // 64) for client in federation.clients
    )
    total = sum(client.num_samples for client in federation.clients)
    assert mean_iterations(federation) == pytest.approx(expected / total)
    assert len(round_clients(federation, 1)) == 4


def test_theory_of_a_run_is_written_once(fedsc_run: RunData) -> None:
    before = (fedsc_run.path / "metrics.jsonl").read_bytes()
    found = theory_of(fedsc_run)
    path = fedsc_run.path / "theory.json"
    assert json.loads(path.read_text()) == found
    assert (fedsc_run.path / "metrics.jsonl").read_bytes() == before
    assert len(found["bound"]) == len(found["observed"]) == 3
    assert found["constants"]["M"] == 2
    assert found["constants"]["C"] == 10
    assert found["constants"]["L0"] == pytest.approx(2.3, abs=0.1)  # log 10, untrained
    assert min(found["constants"][name] for name in ("L1", "L2", "B", "sigma2")) > 0
    written = path.stat().st_mtime_ns
    theory_of(fedsc_run)
    assert path.stat().st_mtime_ns == written
    theory_of(fedsc_run, xi=1e9)
    assert path.stat().st_mtime_ns > written


def test_the_theorems_are_about_fedsc(run_folders: Path) -> None:
    with pytest.raises(FedscError, match="about fedsc only"):
        theory_of(read_run(run_folders / "fedavg-seed0"))
