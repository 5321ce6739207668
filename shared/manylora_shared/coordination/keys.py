"""Every key that manylora keeps in the coordination store. Values are JSON (records.py)."""

# /manylora/workers/<worker_id>              WorkerRecord, bound to the worker's lease
# /manylora/routers/<router_id>              RouterRecord, bound to the router's lease
# /manylora/scheduler/leader                 SchedulerRecord, bound to the leader's lease; create_revision = epoch
# /manylora/scheduler/clock                  ClockIndexRecord
# /manylora/scheduler/clock/<bank>/<part>    a part of the clock's bytes
# /manylora/scheduler/hot-adapters           HotAdaptersRecord: what new workers load first
# /manylora/tenants/<tenant_id>              TenantPolicy as YAML text
# /manylora/applied/<tenant_id>              what AdminService applied there last
# /manylora/adapters/<tenant_id>/<name>      AdapterRecord
# /manylora/keys/<key_id>                    KeyRecord: an API key's hash, never the key
# /manylora/answers/<tenant_id>/<digest>     AnswerRecord: of an idempotency key; its lease outlives its router
# /manylora/schedulers/<scheduler_id>        SchedulerMember, leading or not, bound to its own lease
# /manylora/data_keys/<owner>                DataKeyRecord: wrapped; a tenant's goes with its policy
# /manylora/audit/<chain>                    AuditHeadRecord

from __future__ import annotations

ROOT = "/manylora/"
WORKERS = ROOT + "workers/"
ROUTERS = ROOT + "routers/"
SCHEDULER_LEADER = ROOT + "scheduler/leader"
SCHEDULER_CLOCK = ROOT + "scheduler/clock"
HOT_ADAPTERS = ROOT + "scheduler/hot-adapters"
TENANTS = ROOT + "tenants/"
APPLIED = ROOT + "applied/"
ADAPTERS = ROOT + "adapters/"
API_KEYS = ROOT + "keys/"
ANSWERS = ROOT + "answers/"
SCHEDULERS = ROOT + "schedulers/"
DATA_KEYS = ROOT + "data_keys/"
AUDIT_HEADS = ROOT + "audit/"


def worker(worker_id: str) -> str:
    return WORKERS + worker_id


def router(router_id: str) -> str:
    return ROUTERS + router_id


def scheduler_clock_part(bank: int, part: int) -> str:
    return f"{SCHEDULER_CLOCK}/{bank}/{part}"


def tenant(tenant_id: str) -> str:
    return TENANTS + tenant_id


def applied(tenant_id: str) -> str:
    return APPLIED + tenant_id


def adapter(tenant_id: str, name: str) -> str:
    return f"{ADAPTERS}{tenant_id}/{name}"


def adapters_of(tenant_id: str) -> str:
    return f"{ADAPTERS}{tenant_id}/"


def api_key(key_id: str) -> str:
    return API_KEYS + key_id


def answer(tenant_id: str, digest: str) -> str:
    return f"{ANSWERS}{tenant_id}/{digest}"


def scheduler(scheduler_id: str) -> str:
    return SCHEDULERS + scheduler_id


def data_key(owner: str) -> str:
    return DATA_KEYS + owner


def audit_head(chain: str) -> str:
    return AUDIT_HEADS + chain
