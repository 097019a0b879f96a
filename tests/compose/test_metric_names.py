"""Every metric that a panel, a rule or an alert reads is one that the services really have, and
every metric that they have is read by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from draft_service.service import DraftService
from outrider.serving.server import listening
from outrider.serving.settings import DraftSettings
from tests.support.dashboards import Query, Selector, panel_queries, rule_queries, selectors
from tests.support.gateways import gateway_on
from tests.support.in_process import running_target
from tests.support.stacks import ask
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(120)

JOBS = ("gateway", "target", "draft")
NOT_EVERYWHERE = {"outrider_energy_joules_total"}
"""What only some machines can tell."""
Labels = dict[str, set[str]]


def samples_of(registry: CollectorRegistry) -> dict[str, Labels]:
    """The names of all samples, and for each label of theirs its values."""
    found: dict[str, Labels] = defaultdict(lambda: defaultdict(set))
    for family in registry.collect():
        for sample in family.samples:
            for label, value in sample.labels.items():
                found[sample.name][label].add(value)
            found[sample.name]  # also without labels
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Labels]]:
    """By service, what each shows when one answer with drafts has gone through all three."""
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    drafter = DraftService(DraftSettings(port=0))
    async with (
        listening(drafter, "127.0.0.1", 0) as draft,
        running_target(model, f"127.0.0.1:{draft.port}") as target,
        gateway_on(model, [target.address]) as gateway,
    ):
        await gateway.wait_health(True)
        await ask(gateway, "one river runs", k=4, max_tokens=40)
        services = (gateway.service, target.service, drafter)
        return {
            job: samples_of(service.registry) for job, service in zip(JOBS, services, strict=True)
        }


def read_by_us() -> Iterator[tuple[Query, Selector]]:
    """Every selector of one of our own metrics, and where it stands."""
    for query in panel_queries() + rule_queries():
        for selector in selectors(query.expr):
            if selector.name.startswith("outrider_"):
                yield query, selector


def test_what_is_read_exists(samples: dict[str, dict[str, Labels]]) -> None:
    """Each metric that is named exists in the service that is named with it, with these labels, and
    with these values of them."""
    for query, selector in read_by_us():
        if selector.name in NOT_EVERYWHERE:
            continue
        assert selector.jobs, f"{query}: {selector.name} without a job"
        for job in selector.jobs:
            assert selector.name in samples[job], f"{query}: the {job} has no {selector.name}"
            labels = samples[job][selector.name]
            for label, _, value in selector.matchers:
                if label in ("job", "instance"):  # Prometheus's own
                    continue
                assert label in labels, f"{query}: {selector.name} has no label {label}"
                assert set(value.split("|")) <= labels[label], f"{query}: {label}={value}"


def test_what_is_counted_is_read(samples: dict[str, dict[str, Labels]]) -> None:
    """Each of our metrics is on a panel or in a rule: what nobody looks at need not be counted."""
    read = {(job, selector.name) for _, selector in read_by_us() for job in selector.jobs}
    unread = {
        (job, name)
        for job in JOBS
        for name in samples[job]
        if name.startswith("outrider_")
        and not {(job, name), (job, histogram_of(name) + "_bucket")} & read
    }
    assert unread == set()


def histogram_of(name: str) -> str:
    """The histogram that a sample belongs to, if it does to one."""
    return name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
