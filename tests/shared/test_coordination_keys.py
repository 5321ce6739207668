"""Every key of the store: which prefix lists it, and that no two are the same."""

from __future__ import annotations

from manylora_shared.coordination import keys


def test_each_key_stands_under_the_prefix_by_which_it_is_listed() -> None:
    assert keys.worker("w").startswith(keys.WORKERS)
    assert keys.router("r").startswith(keys.ROUTERS)
    assert keys.tenant("t").startswith(keys.TENANTS)
    assert keys.api_key("k").startswith(keys.API_KEYS)
    assert keys.adapter("t", "n").startswith(keys.adapters_of("t"))
    assert keys.adapters_of("t").startswith(keys.ADAPTERS)
    assert keys.scheduler_clock_part(0, 1).startswith(keys.SCHEDULER_CLOCK + "/")


def test_a_tenant_whose_name_begins_with_anothers_is_not_listed_with_it() -> None:
    assert not keys.adapter("acme2", "n").startswith(keys.adapters_of("acme"))


def test_no_prefix_lists_what_is_not_its_own() -> None:
    prefixes = [keys.WORKERS, keys.ROUTERS, keys.TENANTS, keys.ADAPTERS, keys.API_KEYS]
    prefixes += [keys.SCHEDULER_LEADER, keys.SCHEDULER_CLOCK]
    assert all(prefix.startswith(keys.ROOT) for prefix in prefixes)
    assert [a for a in prefixes for b in prefixes if a is not b and a.startswith(b)] == []
    assert keys.scheduler_clock_part(1, 11) != keys.scheduler_clock_part(11, 1)
