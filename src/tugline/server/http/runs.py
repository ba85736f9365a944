"""Handlers of runs: trainers' reports, where time goes, verdicts, and judging sessions again."""

from collections.abc import Iterable
from typing import Any

from tugline import protocol
from tugline.server.http import route
from tugline.server.store import changes, problems, runs, sessions, telemetry, time_spent
from tugline.server.store.base import Tx

ROUTES = route.Routes()


@ROUTES.add("GET", "/v1/runs", route.READERS)
async def list_runs(call: route.PlainCall) -> list[protocol.RunView]:
    """List runs without their configuration, the last changed first."""
    return await call.db.read(runs.list_views)


@ROUTES.add("GET", "/v1/runs/{id}", route.READERS)
async def get_run(call: route.PlainCall) -> protocol.RunView:
    """Get a run with its configuration."""
    return await call.db.read(runs.get, call.id)


@ROUTES.add("PUT", "/v1/runs/{id}", route.CLIENTS, max_body=16 << 20)
async def start_run(call: route.BodyCall[protocol.RunStart]) -> protocol.RunView:
    """Register a run, or continue it."""
    return await call.db.write(runs.start, call.caller.check_name("run", call.id), call.body)


@ROUTES.add("POST", "/v1/runs/{id}/end", route.CLIENTS)
async def end_run(call: route.PlainCall) -> protocol.RunView:
    """Record that a run has ended."""
    return await call.db.write(runs.end, call.caller.check_name("run", call.id))


@ROUTES.add("GET", "/v1/runs/{id}/steps", route.READERS)
async def list_steps(call: route.QueryCall[protocol.StepQuery]) -> list[protocol.RunStep]:
    """List the reported steps of a trainer's run."""
    return await call.db.read(runs.list_steps, call.id, call.query)


@ROUTES.add("POST", "/v1/runs/{id}/steps", route.CLIENTS, audited=False)
async def report_step(call: route.BodyCall[protocol.RunStep]) -> None:
    """Report figures of a step; figures of the same names are replaced."""
    await call.db.write(runs.report_step, call.caller.check_name("run", call.id), call.body)


@ROUTES.add("GET", "/v1/runs/{id}/problems", route.READERS)
async def list_problems(
    call: route.QueryCall[protocol.ProblemQuery],
) -> list[protocol.ProblemScore]:
    """Sum up the ended sessions of a run by problem."""
    query = call.query
    scope = problems.Scope(call.id, query.first, query.last, query.held_out)
    return await call.db.read(problems.list_scores, scope)


@ROUTES.add("GET", "/v1/runs/{id}/changes", route.READERS)
async def find_changes(call: route.QueryCall[protocol.ChangeQuery]) -> protocol.Changes:
    """Compare a run with another one, or its own earlier sessions, problem by problem."""
    return await call.db.read(changes.find, call.id, call.query)


# --------------------------------------------------------------------------- time and load
@ROUTES.add("GET", "/v1/time-spent", route.READERS)
async def read_time_spent(call: route.QueryCall[protocol.TimeQuery]) -> protocol.TimeSpent:
    """Read where the time of sessions went, by version of the weights or over time."""
    return await call.db.read(time_spent.read, call.query)


@ROUTES.add("GET", "/v1/telemetry", route.READERS)
async def read_telemetry(call: route.QueryCall[protocol.TelemetryQuery]) -> protocol.Telemetry:
    """Read the load of nodes and engines over time."""
    return await call.db.read(telemetry.read, call.query)


# --------------------------------------------------------------------------- verdicts
@ROUTES.add("GET", "/v1/sessions/{id}/verdicts", route.READERS)
async def list_verdicts(call: route.PlainCall) -> list[protocol.VerdictView]:
    """List the verdicts on a session."""
    return await call.control.verdicts.read(call.id)


@ROUTES.add("POST", "/v1/rejudge", route.CLIENTS)
async def rejudge(call: route.BodyCall[protocol.RejudgeRequest]) -> protocol.Rejudging:
    """Queue the judging of recorded sessions; what was queued before is not queued again."""
    call.caller.check_name("run", call.body.run)
    await _check_owner(call, call.body.sessions)
    return await call.control.verdicts.rejudge(call.body)


@ROUTES.add("POST", "/v1/verdicts", route.CLIENTS)
async def use_verdicts(call: route.BodyCall[protocol.VerdictChoice]) -> list[protocol.ResultView]:
    """Put verdicts in force, all or none; a result whose reward changes gets a new position."""
    await _check_owner(call, call.body.sessions)
    return await call.control.verdicts.use(call.body.sessions)


async def _check_owner(call: route.ApiCall[Any, Any], ids: Iterable[str]) -> None:
    """Check the right to change these sessions. Raises `Refusal`, and `Missing`."""

    def read(tx: Tx) -> set[str]:
        return {sessions.get(tx, session).tenant for session in ids}

    for tenant in sorted(await call.db.read(read)):
        call.caller.check_tenant(tenant)
