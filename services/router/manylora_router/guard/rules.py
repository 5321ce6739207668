"""Which scope each RPC and each HTTP route asks for: the one table. What has no rule here is refused. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from manylora_shared.errors import PermissionDenied
from manylora_shared.tenancy.identity import Principal
from manylora_shared.tenancy.roles import Scope


@dataclass(frozen=True)
class Rule:
    scopes: tuple[Scope, ...]  # one of them is enough; none: the call is open to everybody
    is_clusters: bool = False  # only a key that is bound to no tenant may call
    is_act: bool = False  # it changes something, or hands weights out: the audit log has it

    @property
    def is_open(self) -> bool:
        return not self.scopes

    def permits(self, principal: Principal) -> bool:
        if self.is_clusters and principal.tenant_id is not None:
            return False
        return self.is_open or any(principal.may(scope) for scope in self.scopes)


def _act(scope: Scope) -> Rule:
    return Rule((scope,), is_act=True)


_OPEN = Rule(())
_GENERATE = Rule((Scope.GENERATE, Scope.GATEWAY))
_METRICS = Rule((Scope.METRICS_READ,))
_TRACES = Rule((Scope.TRACES_READ,))
_USAGE = Rule((Scope.USAGE_READ,))

RPCS: Mapping[str, Rule] = {
    "InferenceService/Generate": _GENERATE,
    "InferenceService/ListModels": _GENERATE,
    "InferenceService/GiveFeedback": _GENERATE,
    "AdminService/ApplyTenant": _act(Scope.TENANTS_WRITE),
    "AdminService/GetTenant": Rule((Scope.TENANTS_READ,)),
    "AdminService/ListTenants": Rule((Scope.TENANTS_READ,), is_clusters=True),
    "AdminService/DeleteTenant": _act(Scope.TENANTS_DELETE),
    "AdminService/AddAdapter": _act(Scope.ADAPTERS_WRITE),
    "AdminService/CheckAdapter": Rule((Scope.ADAPTERS_WRITE,)),
    "AdminService/RemoveAdapter": _act(Scope.ADAPTERS_WRITE),
    "AdminService/VerifyAdapters": Rule((Scope.ADAPTERS_WRITE,)),
    "AdminService/ListAdapters": Rule((Scope.ADAPTERS_READ,)),
    "AdminService/GetAdapterLine": Rule((Scope.ADAPTERS_READ,)),
    "AdminService/ReadAdapter": _act(Scope.WEIGHTS_READ),
    "AdminService/GetAdapterReport": Rule((Scope.SAMPLES_READ,)),
    "AdminService/ListSamples": Rule((Scope.SAMPLES_READ,)),
    "AdminService/PutSamples": _act(Scope.SAMPLES_WRITE),
    "AdminService/RemoveSamples": _act(Scope.SAMPLES_WRITE),
    "AdminService/RolloutAdapter": _act(Scope.ROLLOUTS_WRITE),
    "AdminService/PromoteAdapter": _act(Scope.ROLLOUTS_WRITE),
    "AdminService/RollbackAdapter": _act(Scope.ROLLOUTS_WRITE),
    "AdminService/RetireAdapter": _act(Scope.ROLLOUTS_WRITE),
    "AdminService/CreateKey": _act(Scope.KEYS_WRITE),
    "AdminService/RotateKey": _act(Scope.KEYS_WRITE),
    "AdminService/RevokeKey": _act(Scope.KEYS_WRITE),
    "AdminService/ListKeys": Rule((Scope.KEYS_READ,)),
    "AdminService/LiftQuarantine": _act(Scope.CLUSTER_WRITE),
    "AdminService/Drain": _act(Scope.CLUSTER_WRITE),
    "AdminService/DropWorkerCaches": _act(Scope.CLUSTER_WRITE),
    "AdminService/ReadAudit": Rule((Scope.AUDIT_READ,)),
    "AdminService/GetStatus": _METRICS,
    "AdminService/GetUsage": _USAGE,
    "DataService/GetEncryption": Rule((Scope.METRICS_READ,), is_clusters=True),
    "DataService/RotateEncryption": _act(Scope.CLUSTER_WRITE),
    "DataService/SealStores": _act(Scope.CLUSTER_WRITE),
    "DataService/ExportTexts": _act(Scope.TEXTS_READ),
    "DataService/EraseTexts": _act(Scope.TEXTS_ERASE),
}

# A path that ends in `/` has something behind it.
ROUTES: Mapping[str, Rule] = {
    "GET /health": _OPEN,
    "GET /ping": _OPEN,
    "POST /ping": _OPEN,
    "GET /ready": _OPEN,
    "GET /version": _OPEN,
    "GET /openapi.json": _OPEN,
    "GET /console": _OPEN,  # the pages themselves; what they ask has rules below
    "POST /v1/completions": _GENERATE,
    "POST /v1/chat/completions": _GENERATE,
    "POST /v1/responses": _GENERATE,
    "POST /v1/messages": _GENERATE,
    "POST /v1/messages/count_tokens": _GENERATE,
    "POST /v1/feedback": _GENERATE,
    "POST /tokenize": _GENERATE,
    "POST /detokenize": _GENERATE,
    "GET /tokenizer_info": _GENERATE,
    "GET /v1/models": _GENERATE,
    "GET /v1/models/": _GENERATE,
    "POST /v1/load_lora_adapter": RPCS["AdminService/AddAdapter"],
    "POST /v1/unload_lora_adapter": RPCS["AdminService/RemoveAdapter"],
    "GET /v1/usage": _USAGE,
    "GET /console/api/me": Rule((Scope.METRICS_READ, Scope.TRACES_READ, Scope.USAGE_READ)),
    "GET /console/api/status": _METRICS,
    "GET /console/api/history": _METRICS,
    "GET /console/api/adapters": _METRICS,
    "GET /console/api/requests": _TRACES,
    "GET /console/api/requests/": _TRACES,
    "GET /metrics": Rule((Scope.METRICS_READ,), is_clusters=True),
}


NOBODY = Principal("", None, ())


def check(rules: Mapping[str, Rule], name: str, principal: Principal = NOBODY) -> Rule:
    """Raises PermissionDenied, also where there is no rule."""
    rule = rules.get(name)
    if rule is None:
        raise PermissionDenied(f"{name} is open to nobody: no rule says to whom")
    if not rule.permits(principal):
        raise principal.denied()
    return rule
