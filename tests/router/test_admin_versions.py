"""Versions of an adapter through the router's own services: who gets which, and what every answer says of it."""

from __future__ import annotations

from typing import Any

import pytest
from manylora_router.admin import versions
from manylora_shared.coordination import keys
from manylora_shared.errors import Code, RpcError
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from router_fakes import RouterCluster, simulate, text_request
from test_admin_adapters import CONFIG, GOOD, call, chunk, header, upload

NAME = {"tenant_id": "acme", "name": "lower"}


async def add_two(cluster: RouterCluster) -> tuple[Any, Any]:
    first = (await upload(cluster, header(), *GOOD)).adapter
    other = [chunk(CONFIG_NAME, CONFIG), chunk(WEIGHTS_NAME, b"other")]
    second = (await upload(cluster, header(), *other)).adapter
    return first, second


async def answered_by(cluster: RouterCluster, name: str = "lower", **metadata: str) -> tuple[str, str]:
    answer = await cluster.ask(text_request(), x_adapter_id=name, **metadata)
    assert answer.error is None, answer.error
    started = answer.frames[0].started
    return started.adapter, started.adapter_version


def test_a_second_version_is_promoted_rolled_back_and_asked_for() -> None:
    async def test(cluster: RouterCluster) -> None:
        first, second = await add_two(cluster)
        assert [first.number, second.number] == [1, 2]
        assert first.version != second.version
        one, two = ("lower@1", first.version), ("lower@2", second.version)
        assert await answered_by(cluster) == one
        assert await answered_by(cluster, "lower@2") == two
        line = (await call(cluster, "PromoteAdapter", **NAME)).line
        assert (line.in_force, [v.number for v in line.versions]) == (2, [1, 2])
        assert await answered_by(cluster) == two
        assert await answered_by(cluster, "lower@1") == one
        assert (await call(cluster, "RollbackAdapter", **NAME)).line.in_force == 1
        assert await answered_by(cluster) == one
        line = (await call(cluster, "GetAdapterLine", **NAME)).line
        assert [(e.change, e.number, e.before) for e in line.events] == [
            ("add", 2, 0),
            ("promote", 2, 1),
            ("rollback", 1, 2),
        ]
        line = (await call(cluster, "RetireAdapter", **NAME, number=2)).line
        assert line.versions[1].retired_unix_s > 0
        gone = await cluster.ask(text_request(), x_adapter_id="lower@2")
        assert gone.error is not None
        assert gone.error.code is Code.NOT_FOUND
        [listed] = [a for a in (await call(cluster, "ListAdapters", tenant_id="acme")).adapters if a.name == "lower"]
        assert (listed.number, listed.version) == (1, first.version)

    simulate(test)


def test_a_rollout_gives_a_share_and_users_keep_theirs() -> None:
    async def test(cluster: RouterCluster) -> None:
        await add_two(cluster)
        with pytest.raises(RpcError) as error:
            await call(cluster, "RolloutAdapter", **NAME, to=3, percent=10)
        assert [v.field for v in error.value.violations] == ["to"]
        line = (await call(cluster, "RolloutAdapter", **NAME, to=2, percent=50, sticky="user")).line
        assert (line.rollout.to, line.rollout.percent, line.rollout.sticky) == (2, 50, "user")
        got = {user: (await answered_by(cluster, x_user_id=user))[0] for user in map(str, range(24))}
        assert set(got.values()) == {"lower@1", "lower@2"}
        await call(cluster, "RolloutAdapter", **NAME, to=2, percent=90, sticky="user")
        for user, before in got.items():
            after, _ = await answered_by(cluster, x_user_id=user)
            assert after >= before
        await call(cluster, "RolloutAdapter", **NAME, to=2, percent=0, sticky="user")
        assert {(await answered_by(cluster, x_user_id=user))[0] for user in got} == {"lower@1"}

    simulate(test)


def test_a_stream_keeps_its_version_and_its_files_stay() -> None:
    async def test(cluster: RouterCluster) -> None:
        first, second = await add_two(cluster)
        stream = cluster.open(text_request(), x_adapter_id="lower")
        await call(cluster, "PromoteAdapter", **NAME)
        frame = await stream.read()
        assert frame is not None
        seen = {frame.started.adapter}
        while (frame := await stream.read()) is not None:
            seen |= {frame.started.adapter} - {""}
        assert seen <= {"lower@1", "lower@2"}
        assert len(seen) == 1
        await cluster.app._collect([])
        assert {first.version, second.version} <= {path.removeprefix("objects/") for path in cluster.files.files}

    simulate(test)


def test_a_rollout_that_judges_itself_begins_with_its_first_step_and_stands_in_the_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(cluster: RouterCluster) -> None:
        await add_two(cluster)
        for auto, said in (({"steps": [9, 3]}, "steps must grow"), ({"step_limit_s": 0.1}, "step_limit_s")):
            with pytest.raises(RpcError) as error:
                await call(cluster, "RolloutAdapter", **NAME, to=2, auto=auto)
            [violation] = error.value.violations
            assert (violation.field, said in violation.description) == ("auto", True)
        rollout = (await call(cluster, "RolloutAdapter", **NAME, to=2, percent=70, auto={})).line.rollout
        assert (rollout.percent, list(rollout.auto.steps)) == (1, [1, 10, 50])
        assert (rollout.auto.min_requests, rollout.auto.step_limit_s, rollout.progress.limit) == (200, 86400.0, 100.0)
        [status] = (await call(cluster, "GetStatus")).rollouts
        assert (status.tenant_id, status.name, status.in_force, status.rollout) == ("acme", "lower", 1, rollout)
        made = await call(cluster, "CreateKey", tenant_id="other", scopes=["admin"])
        channel = cluster.caller(made.key)
        cluster._client, own = channel, cluster._client
        assert list((await call(cluster, "GetStatus")).rollouts) == []
        cluster._client = own
        await channel.close()
        for most, whose in (("MAX_TRIALS_OF_TENANT", "this tenant"), ("MAX_TRIALS", "all tenants")):
            monkeypatch.setattr(versions, most, 0)
            with pytest.raises(RpcError, match=f"auto: 0 rollouts of {whose} judge themselves now"):
                await call(cluster, "RolloutAdapter", **NAME, to=2, auto={})
            monkeypatch.undo()
        again = (await call(cluster, "RolloutAdapter", **NAME, to=2, auto={})).line
        assert [event.change for event in again.events] == ["add", "rollout", "rollout"]
        by_hand = (await call(cluster, "RolloutAdapter", **NAME, to=2, percent=7)).line.rollout
        assert (by_hand.percent, by_hand.HasField("auto")) == (7, False), "a person's word ends the trial"

    simulate(test)


def test_only_admins_of_the_tenant_change_its_versions() -> None:
    async def test(cluster: RouterCluster) -> None:
        await add_two(cluster)
        made = await call(cluster, "CreateKey", tenant_id="other", scopes=["admin"])
        generate = await call(cluster, "CreateKey", tenant_id="acme", scopes=["generate"])
        before = await cluster.store.get(keys.adapter("acme", "lower"))
        for key in (made.key, generate.key):
            channel = cluster.caller(key)
            cluster._client, own = channel, cluster._client
            for method, more in (("RollbackAdapter", {}), ("PromoteAdapter", {}), ("RetireAdapter", {"number": 2})):
                with pytest.raises(RpcError) as error:
                    await call(cluster, method, **NAME, **more)
                assert error.value.code is Code.PERMISSION_DENIED
            cluster._client = own
            await channel.close()
        assert await cluster.store.get(keys.adapter("acme", "lower")) == before

    simulate(test)
