"""InferenceService over gRPC: its messages and metadata to plain requests, frames to its messages. Decides nothing."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from google.protobuf import struct_pb2
from manylora.v1 import common_pb2, inference_pb2
from manylora_shared.constraints.constraint import Constraint
from manylora_shared.errors import InvalidRequest
from manylora_shared.metadata import (
    ADAPTER_KEY,
    CLASS_KEY,
    CONVERSATION_KEY,
    HEDGE_KEY,
    IDEMPOTENCY_KEY,
    PRIORITY_KEY,
    TENANT_KEY,
    TRACEPARENT_KEY,
    USER_KEY,
)
from manylora_shared.sampling import Sampling
from manylora_shared.tenancy.identity import AUTHORIZATION_KEY, Principal
from manylora_shared.transport.base import Gate, ServerCall, Service

from manylora_router.front.feedback import FeedbackDesk
from manylora_router.front.frame_messages import message_of
from manylora_router.front.generation import Outliving, generate
from manylora_router.front.intake import Intake
from manylora_router.guard import admission
from manylora_router.guard.admission import (
    MAX_CHAT_MESSAGES,
    MAX_CHOICES,
    MAX_TEMPLATE_KWARGS_BYTES,
    TEMPLATE_KWARGS,
    ChatPrompt,
    Prompt,
    RequestInput,
    Resume,
    TextPrompt,
    TokenPrompt,
)
from manylora_router.links.entrance import Entrance
from manylora_router.request.call import Calls


class InferenceServicer:
    def __init__(
        self, intake: Intake, calls: Calls, feedback: FeedbackDesk, entrance: Entrance, outliving: Outliving
    ) -> None:
        self._entrance = entrance
        self._intake = intake
        self._calls = calls
        self._feedback = feedback
        self._outliving = outliving

    def service(self, gate: Gate) -> Service:
        descriptor = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
        handlers: dict[str, Callable[..., Any]] = {
            "Generate": self.generate,
            "ListModels": self.list_models,
            "GiveFeedback": self.give_feedback,
        }
        guarded = self._entrance.guarded(descriptor, handlers)
        return Service(descriptor, guarded, gate=gate, crowded=("Generate",))

    async def give_feedback(
        self, request: inference_pb2.GiveFeedbackRequest, call: ServerCall
    ) -> inference_pb2.GiveFeedbackResponse:
        plain = read_request(inference_pb2.GenerateRequest(), call.metadata, None)
        return await self._feedback.give(self._intake.tenant_of(plain), request, call.metadata)

    async def list_models(
        self, request: inference_pb2.ListModelsRequest, call: ServerCall
    ) -> inference_pb2.ListModelsResponse:
        plain = read_request(inference_pb2.GenerateRequest(), call.metadata, None)
        await self._intake.take_turn(self._intake.tenant_of(plain), None)
        models = self._intake.models(plain)
        return inference_pb2.ListModelsResponse(
            base_model=models.base_model,
            max_context_tokens=models.max_context_tokens,
            sampling_defaults=common_pb2.SamplingParams(**models.sampling_defaults),
            adapters=sorted([*(record.name for record in models.adapters), *models.compositions]),
            pools=[
                inference_pb2.PoolModel(
                    name=name, pool=pool, base_model=model.name, max_context_tokens=model.limits.max_context_tokens
                )
                for name, pool, model in models.pools
            ],
        )

    async def generate(
        self, request: inference_pb2.GenerateRequest, call: ServerCall
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        plain = read_request(request, call.metadata, call.time_remaining())
        made = generate(plain, intake=self._intake, calls=self._calls, outliving=self._outliving)
        async with aclosing(made) as frames:
            async for frame in frames:
                yield message_of(frame)


def tenant_of(principal: Principal, call: ServerCall) -> str:
    """Raises PermissionDenied."""
    return admission.tenant_of(principal, call.metadata.get(TENANT_KEY, ""))


def read_request(
    request: inference_pb2.GenerateRequest, metadata: Mapping[str, str], time_remaining_s: float | None
) -> RequestInput:
    return RequestInput(
        prompt=_read_prompt(request),
        max_tokens=request.max_tokens,
        sampling=Sampling.of_message(request.sampling),
        constraint=Constraint.of_message(request.constraint) if request.HasField("constraint") else None,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        n=request.n,
        request_class=metadata.get(CLASS_KEY, ""),
        priority=metadata.get(PRIORITY_KEY, ""),
        idempotency_key=metadata.get(IDEMPOTENCY_KEY, ""),
        fingerprint=_fingerprint(request, metadata) if IDEMPOTENCY_KEY in metadata else b"",
        is_resumable=request.resumable,
        keep_s=request.keep_s,
        resume=_read_resume(request.resume) if request.HasField("resume") else None,
        is_hedge=HEDGE_KEY in metadata,
        ignore_eos=request.ignore_eos,
        authorization=metadata.get(AUTHORIZATION_KEY, ""),
        tenant=metadata.get(TENANT_KEY, ""),
        adapter=metadata.get(ADAPTER_KEY, ""),
        model=request.model,
        is_movable=True,
        conversation=metadata.get(CONVERSATION_KEY, ""),
        user=metadata.get(USER_KEY, ""),
        traceparent=metadata.get(TRACEPARENT_KEY),
        time_remaining_s=time_remaining_s,
    )


def _fingerprint(request: inference_pb2.GenerateRequest, metadata: Mapping[str, str]) -> bytes:
    asked = inference_pb2.GenerateRequest()
    asked.CopyFrom(request)
    for name in ("resumable", "keep_s", "resume"):
        asked.ClearField(name)
    digest = hashlib.sha256(asked.SerializeToString(deterministic=True))
    for key in (ADAPTER_KEY, CLASS_KEY):
        digest.update(f"\0{metadata.get(key, '')}".encode())
    return digest.digest()


def _read_resume(resume: inference_pb2.Resume) -> Resume:
    emitted = [
        (list(each.token_ids), each.text_characters) for each in itertools.islice(resume.emitted, MAX_CHOICES + 1)
    ]
    return Resume(resume.token, resume.next_frame, emitted)


def _read_prompt(request: inference_pb2.GenerateRequest) -> Prompt | None:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "token_ids":
            return TokenPrompt(request.token_ids.ids)
        case "chat":
            # No more than admission reads: who sends a million messages, maybe without a key, costs nobody their copy.
            chat = request.chat
            messages = itertools.islice(chat.messages, MAX_CHAT_MESSAGES + 1)
            return ChatPrompt(
                [(m.role, m.content) for m in messages],
                chat.continue_final_message,
                chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
                _template_kwargs(chat.chat_template_kwargs),
            )
        case _:
            return None


def _template_kwargs(given: struct_pb2.Struct) -> dict[str, Any]:
    if (size_bytes := given.ByteSize()) > MAX_TEMPLATE_KWARGS_BYTES:
        message = f"has {size_bytes} bytes; at most {MAX_TEMPLATE_KWARGS_BYTES} are read"
        raise InvalidRequest.of(TEMPLATE_KWARGS, message)
    return {name: _json(value) for name, value in given.fields.items()}


def _json(value: struct_pb2.Value) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":  # protobuf knows no whole numbers here, and templates count with them
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "list_value":
            return [_json(each) for each in value.list_value.values]
        case "struct_value":
            return {name: _json(each) for name, each in value.struct_value.fields.items()}
        case _:
            return None
