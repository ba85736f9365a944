"""Calls of `Client` about runs, and about the verdicts on their sessions."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tugline import protocol
from tugline.client.transport import Transport, quote_id
from tugline.types import PluginSpec

BATCH = 1000
"""Maximum number of tasks or sessions in a request."""


def _list_fields(query: protocol.ProblemQuery | None) -> dict[str, Any]:
    return {} if query is None else msgspec.structs.asdict(query)


class RunsClient:
    """Part of `Client`."""

    _http: Transport

    # ---------------------------------------------------------------------- runs
    async def start_run(
        self,
        name: str,
        kind: protocol.RunKind,
        configuration: Mapping[str, Any] = MappingProxyType({}),
        *,
        parent: str | None = None,
        by: str = "",
    ) -> protocol.RunView:
        """Register a run, or continue it. Raises `Conflict` for a run of another kind."""
        body = protocol.RunStart(kind=kind, configuration=dict(configuration), parent=parent, by=by)
        return await self._http.ask(
            "PUT", f"/v1/runs/{quote_id(name)}", protocol.RunView, body=body
        )

    async def end_run(self, name: str) -> protocol.RunView:
        """Record that a run has ended. Raises `Missing`."""
        return await self._http.ask("POST", f"/v1/runs/{quote_id(name)}/end", protocol.RunView)

    async def run_view(self, name: str) -> protocol.RunView:
        """Read a run with its configuration. Raises `Missing`."""
        return await self._http.get(f"/v1/runs/{quote_id(name)}", protocol.RunView)

    async def report_step(
        self,
        run: str,
        step: int,
        figures: Mapping[str, float] = MappingProxyType({}),
        *,
        notes: Mapping[str, str] = MappingProxyType({}),
        rewound: bool = False,
    ) -> None:
        """Report finite figures and notes of a step of a trainer, which the console shows.

        Earlier reports of the step under other names stay. With `rewound`, later steps are deleted.
        """
        body = protocol.RunStep(
            step=step, figures=dict(figures), notes=dict(notes), rewound=rewound
        )
        await self._http.ask("POST", f"/v1/runs/{quote_id(run)}/steps", type(None), body=body)

    async def runs(self) -> list[protocol.RunView]:
        """List runs without their configuration, the last changed first."""
        return await self._http.get("/v1/runs", list[protocol.RunView])

    async def run_steps(self, run: str, *, after: int = -1) -> list[protocol.RunStep]:
        """List up to 1,000 steps after the step `after`."""
        path = f"/v1/runs/{quote_id(run)}/steps"
        return await self._http.get(path, list[protocol.RunStep], query={"after": after})

    async def run_problems(
        self, run: str, query: protocol.ProblemQuery | None = None
    ) -> list[protocol.ProblemScore]:
        """Sum up the ended sessions of a run by problem. Raises `Missing`."""
        path = f"/v1/runs/{quote_id(run)}/problems"
        return await self._http.get(path, list[protocol.ProblemScore], query=_list_fields(query))

    async def run_changes(
        self, run: str, query: protocol.ChangeQuery | None = None
    ) -> protocol.Changes:
        """Compare two parts of runs, problem by problem. Raises `Missing`."""
        path = f"/v1/runs/{quote_id(run)}/changes"
        return await self._http.get(path, protocol.Changes, query=_list_fields(query))

    # ---------------------------------------------------------------------- verdicts
    async def rejudge(
        self,
        run: str,
        sessions: Iterable[str],
        *,
        evaluator: PluginSpec | None = None,
        rounds: int = 1,
    ) -> protocol.Rejudging:
        """Queue the judging of recorded sessions, by their own evaluator or another one.

        `run` is a run of `start_run`. What was queued before is not queued again. Raises `Invalid`
        for an evaluator that is unknown or cannot judge recorded sessions, and `Missing`.
        """
        tasks: dict[str, tuple[str, ...]] = {}
        digests: dict[str, str] = {}
        refused: dict[str, str] = {}
        names = tuple(sessions)
        for start in range(0, len(names), BATCH):
            batch = names[start : start + BATCH]
            body = protocol.RejudgeRequest(
                run=run, sessions=batch, evaluator=evaluator, rounds=rounds
            )
            part = await self._http.ask("POST", "/v1/rejudge", protocol.Rejudging, body=body)
            tasks |= part.tasks
            digests |= part.digests
            refused |= part.refused
        return protocol.Rejudging(tasks=tasks, digests=digests, refused=refused)

    async def verdicts(self, session: str) -> list[protocol.VerdictView]:
        """Read the verdicts on a session, by number. Raises `Missing`."""
        path = f"/v1/sessions/{quote_id(session)}/verdicts"
        return await self._http.get(path, list[protocol.VerdictView])

    async def use_verdicts(self, numbers: Mapping[str, int]) -> list[protocol.ResultView]:
        """Put the verdict of this number in force on each of up to 1,000 sessions, all or none.

        A result whose reward changes is delivered to every consumer again, and its group once for
        each call. Raises `Missing`, and `Invalid` for a verdict without a reward.
        """
        body = protocol.VerdictChoice(sessions=dict(numbers))
        return await self._http.ask("POST", "/v1/verdicts", list[protocol.ResultView], body=body)
