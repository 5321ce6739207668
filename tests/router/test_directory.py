"""What the router knows of the cluster, where the store has what cannot be read."""

from __future__ import annotations

from manylora_shared.errors import Code
from router_fakes import RouterCluster, simulate, text_request, until


def test_a_stored_policy_that_cannot_be_read_leaves_the_one_before_in_force() -> None:
    async def test(cluster: RouterCluster) -> None:
        await cluster.put_tenant("acme", "quotas: {max_output_tokens: 3}\n")
        await until(lambda: "max_output" in cluster.app.directory.tenants["acme"].policy_yaml)
        refused = await cluster.ask(text_request(max_tokens=4))
        assert refused.error is not None
        assert refused.error.code is Code.INVALID_ARGUMENT
        await cluster.put_tenant("acme", "quotas: nonsense\n")
        await until(lambda: "nonsense" in cluster.app.directory.tenants["acme"].policy_yaml)
        again = await cluster.ask(text_request(max_tokens=4))
        assert again.error is not None
        assert again.error.message == refused.error.message
        assert (await cluster.ask(text_request(max_tokens=3))).error is None

    simulate(test)
