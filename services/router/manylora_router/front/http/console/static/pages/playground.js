// Talk to any adapter of the key, token by token.

import { data, get, stream } from "/console/api.js";
import { h, ms, NONE, show } from "/console/dom.js";

export const title = "Playground";

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: "Top k", min: -1, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.05 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.1, max: 2, step: 0.05 },
  { name: "seed", label: "Seed", min: 0, step: 1 },
];

export function page(session) {
  let adapters = [];
  let messages = [];
  let running = null;
  const isTenants = !session.operator;
  const tenant = h("select", { id: "tenant" }, session.tenants.map((name) => h("option", { value: name }, name)));
  const model = h("select", { id: "model" });
  const mode = h("select", { id: "mode" }, h("option", { value: "chat" }, "Chat"), h("option", { value: "text" }, "Plain text, no template"));
  const qosClass = h("select", { id: "class" }, ["interactive", "standard", "batch"].map((name) => h("option", { value: name }, name)));
  const maxTokens = h("input", { type: "number", id: "max_tokens", value: 128, min: 1, step: 1, required: true });
  const numbers = NUMBERS.map((each) => ({ ...each, input: h("input", { type: "number", id: each.name, min: each.min, max: each.max, step: each.step, placeholder: "model's" }) }));
  const stop = h("input", { id: "stop", placeholder: "one stop string" });
  const system = h("textarea", { id: "system", rows: 3, placeholder: "no system message" });
  const prompt = h("textarea", { id: "prompt", rows: 3, required: true, placeholder: "Ctrl+Enter sends" });
  const talk = h("div", { class: "talk", role: "log", "aria-label": "Conversation", tabindex: 0 });
  const send = h("button", { class: "main", type: "submit" }, "Send");
  const cancel = h("button", { type: "button", disabled: true, onclick: () => running?.abort() }, "Stop");
  const again = h("button", { type: "button", onclick: () => { messages = []; show(talk); prompt.focus(); } }, "New conversation");
  const field = (label, input, hidden) => !hidden && h("label", { for: input.id }, label, input);

  const side = h("div", { class: "card" }, h("form", { onsubmit: (event) => event.preventDefault() },
    field("Tenant", tenant, isTenants), field("Adapter", model), field("Class", qosClass), field("Mode", mode), field("System message", system),
    h("div", { class: "two" }, field("Max tokens", maxTokens), numbers.map((each) => field(each.label, each.input)), field("Stop", stop))));
  const form = h("form", { class: "card", onsubmit: submit }, talk, field("Message", prompt), h("div", { class: "row" }, send, cancel, again));
  prompt.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && (event.preventDefault(), form.requestSubmit()));
  tenant.addEventListener("change", fillModels);
  mode.addEventListener("change", () => (system.disabled = mode.value === "text"));

  const element = h("div", null,
    h("div", { class: "head" }, h("h1", null, "Playground"), h("p", { class: "soft small" }, "Requests go through the same API as all others: they are queued, counted and charged to the tenant.")),
    session.may_generate ? h("div", { class: "play" }, side, form) : h("p", { class: "notice" }, "This key may not generate: it needs the scope generate, or gateway."));

  async function refresh() {
    if (isTenants) adapters = (await get("/v1/models")).data.slice(1).map((each) => ({ tenant: session.tenant, name: each.id }));
    else adapters = (await data("adapters")).adapters.map((each) => ({ tenant: each.tenant, name: each.name }));
    fillModels();
  }

  function fillModels() {
    const chosen = model.value;
    const own = adapters.filter((each) => isTenants || each.tenant === tenant.value).map((each) => each.name).sort();
    show(model, own.map((name) => h("option", { value: name }, name)), h("option", { value: session.base_model }, `base model (${session.base_model})`));
    model.value = own.includes(chosen) || chosen === session.base_model ? chosen : (own[0] ?? session.base_model);
  }

  function asked(text) {
    const body = { model: model.value, max_tokens: Number(maxTokens.value), stream: true, stream_options: { include_usage: true } };
    for (const each of numbers) if (each.input.value !== "") body[each.name] = Number(each.input.value);
    if (stop.value) body.stop = [stop.value];
    if (mode.value === "text") return ["/v1/completions", { ...body, prompt: text }];
    const given = system.value ? [{ role: "system", content: system.value }] : [];
    return ["/v1/chat/completions", { ...body, messages: [...given, ...messages] }];
  }

  function say(role, text) {
    const words_ = h("span", null, text);
    const foot = h("span", { class: "foot" });
    talk.append(h("div", { class: `said-by ${role}` }, h("span", { class: "role" }, role), words_, foot));
    talk.scrollTop = talk.scrollHeight;
    return { words_, foot };
  }

  async function submit(event) {
    event.preventDefault();
    const text = prompt.value;
    if (running || !text) return;
    say("user", text);
    messages.push({ role: "user", content: text });
    prompt.value = "";
    const shown = say(model.value, "");
    running = new AbortController();
    [send.disabled, cancel.disabled, again.disabled] = [true, false, true];
    const [path, body] = asked(text);
    const headers = { "x-request-class": qosClass.value, ...(isTenants ? {} : { "x-tenant-id": tenant.value }) };
    const began = performance.now();
    let [answer, first, usage, id, finish] = ["", null, null, "", ""];
    let problem = "";
    try {
      for await (const each of stream(path, body, headers, running.signal)) {
        id ||= each.requestId ?? "";
        usage = each.usage ?? usage;
        const choice = each.choices?.[0];
        finish = choice?.finish_reason ?? finish;
        const piece = choice?.delta ? (choice.delta.reasoning_content ?? "") + (choice.delta.content ?? "") : (choice?.text ?? "");
        if (!piece) continue;
        first ??= performance.now() - began;
        answer += piece;
        shown.words_.textContent = answer;
        talk.scrollTop = talk.scrollHeight;
      }
      messages.push({ role: "assistant", content: answer });
    } catch (error) {
      problem = error.name === "AbortError" ? "stopped" : error.message;
      if (answer) messages.push({ role: "assistant", content: answer });
      else messages.pop();
    }
    running = null;
    [send.disabled, cancel.disabled, again.disabled] = [false, true, false];
    const total = performance.now() - began;
    const speed = usage && first !== null && total - first > 50 ? `, ${((1000 * (usage.completion_tokens - 1)) / (total - first)).toFixed(1)} tokens/s` : "";
    show(shown.foot, problem && h("span", { class: "bad" }, `${problem}. `),
      `first token ${ms(first)}, total ${ms(total)}`, usage ? `, ${usage.prompt_tokens} + ${usage.completion_tokens} tokens${speed}` : "", finish ? `, ${finish}` : "", " ",
      id ? h("a", { href: `#/requests/${id}` }, "its life") : NONE);
    prompt.focus();
  }

  return { element, refresh, everyS: 0, leave: () => running?.abort() };
}
