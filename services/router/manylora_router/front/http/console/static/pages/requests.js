// The newest requests, and the life of one by its id.

import { data, Refused } from "/console/api.js";
import { clock, count, h, know, ms, named, NONE, show, stack, table, words } from "/console/dom.js";

export const title = "Requests";

const STAGES = {
  admission: "is being checked",
  queued: "waits in the queue",
  granted: "is on its way to a worker",
  adapter: "waits for its adapter's weights",
  prefill: "has its prompt computed",
  streaming: "streams",
};
const outcome = (life) =>
  h("span", { class: life.outcome === "completed" ? "good" : life.outcome ? "bad" : "" }, life.outcome ? words(life.outcome) : STAGES[life.stage]);

export function page(session, id) {
  return id ? one(session, id) : list(session);
}

function finder(id = "") {
  const input = h("input", { type: "search", id: "request-id", value: id, spellcheck: "false", autocomplete: "off", placeholder: "x-manylora-request-id, or an answer's id", size: 44 });
  const go = (event) => {
    event.preventDefault();
    const wanted = input.value.trim();
    location.hash = wanted ? `#/requests/${encodeURIComponent(wanted)}` : "#/requests";
  };
  return h("form", { class: "card row", role: "search", onsubmit: go }, h("label", { for: "request-id" }, "Request id", input), h("button", { class: "main", type: "submit" }, "Show its life"));
}

function list(session) {
  const box = h("div", { class: "card" });
  const sorting = { by: 0, down: true };
  let found = [];
  const element = h("div", null,
    h("div", { class: "head" }, h("h1", null, "Requests"),
      h("p", { class: "soft small" }, `The newest of those that router ${session.router} remembers: 200 of a tenant, 10,000 in all. Prompts and answers are not kept.`)),
    finder(), box);

  async function refresh() {
    know(session.tenants.slice(0, 8));
    found = (await data("requests")).requests;
    draw();
  }

  function draw() {
    const columns = [
      { name: "Arrived", key: (row) => row.arrived_unix_s, cell: (row) => h("a", { href: `#/requests/${row.request_id}`, title: row.request_id, "data-focus": row.request_id }, clock(row.arrived_unix_s)) },
      session.operator && { name: "Tenant", key: (row) => row.tenant, cell: (row) => named(row.tenant) },
      { name: "Class", key: (row) => row.qos_class, cell: (row) => row.qos_class || NONE },
      { name: "Adapter", key: (row) => row.adapter, cell: (row) => row.adapter || h("span", { class: "soft" }, row.admitted_ms === null ? NONE : "base model") },
      { name: "State", key: (row) => row.outcome, cell: outcome },
      { name: "Queue", num: true, key: (row) => row.queue_ms, cell: (row) => (row.granted_ms === null ? NONE : ms(row.queue_ms)) },
      { name: "First token", num: true, key: (row) => row.first_token_ms, cell: (row) => ms(row.first_token_ms) },
      { name: "Total", num: true, key: (row) => row.ended_ms ?? row.age_ms, cell: (row) => ms(row.ended_ms ?? row.age_ms) },
      { name: "Prompt", num: true, title: "tokens", key: (row) => row.prompt_tokens, cell: (row) => count(row.prompt_tokens) },
      { name: "Output", num: true, title: "tokens", key: (row) => row.completion_tokens, cell: (row) => count(row.completion_tokens) },
    ].filter(Boolean);
    show(box, found.length ? table("Newest requests", columns, found, sorting, draw) : h("p", { class: "soft" }, "No request came through this router yet."));
  }

  return { element, refresh, everyS: 3 };
}

/** From one event to the next: where the time went. */
function phases(life) {
  const end = life.ended_ms ?? life.age_ms;
  const cuts = [
    ["checked and tokenized", "var(--c6)", life.admitted_ms],
    ["queued", "var(--c1)", life.granted_ms],
    ["to the worker", "var(--other)", life.started_ms],
    [life.adapter_found && life.adapter_found !== "device" ? "adapter and prompt" : "prompt", "var(--c0)", life.first_token_ms],
    ["answer", "var(--c2)", end],
  ];
  const parts = [];
  let from = 0;
  for (const [name, paint, until] of cuts) {
    const to = until ?? end;
    if (to > from) parts.push({ name, paint, value: to - from });
    from = Math.max(from, to);
    if (until === null) break;
  }
  return parts;
}

function one(session, id) {
  const box = h("div");
  const element = h("div", null, h("div", { class: "head" }, h("h1", null, "A request's life"), h("p", null, h("a", { href: "#/requests" }, "All requests"))), finder(id), box);
  let isOver = false;

  async function refresh() {
    if (isOver) return;
    try {
      const life = await data(`requests/${encodeURIComponent(id)}`);
      isOver = life.ended_ms !== null;
      draw(life);
    } catch (error) {
      if (!(error instanceof Refused) || error.status !== 404) throw error;
      isOver = true;
      show(box, h("p", { class: "notice" }, `Router ${session.router} does not remember this request${session.operator ? "" : " of this tenant"}. Each router remembers those that came through it, since its start.`));
    }
  }

  function draw(life) {
    const parts = phases(life);
    const events = [
      [0, "arrived", `at ${clock(life.arrived_unix_s)}, class ${life.qos_class || "not known"}`],
      [life.admitted_ms, "admitted", `${count(life.prompt_tokens)} prompt tokens, at most ${count(life.max_tokens)} of output${life.choices > 1 ? ` for each of ${life.choices} choices` : ""}`],
      [life.granted_ms, "granted", `after ${ms(life.queue_ms)} in the scheduler's queue${life.attempts > 1 ? `, in attempt ${life.attempts}` : ""}`],
      [life.started_ms, "begun", `by worker ${life.worker_id}${life.adapter ? `; adapter was ${{ device: "on the device", host: "in host memory", store: "in the store" }[life.adapter_found] ?? ""}` : ""}`],
      [life.first_token_ms, "first token", life.cached_prompt_tokens ? `${count(life.cached_prompt_tokens)} prompt tokens came from the cache` : ""],
      [life.longest_pause_ms > 0 ? life.pause_ended_ms : null, "longest pause ended", `after ${ms(life.longest_pause_ms)} without a token`],
      [life.ended_ms, "ended", `${words(life.outcome)}, ${count(life.completion_tokens)} tokens`],
    ].filter(([at]) => at !== null).sort((a, b) => a[0] - b[0]);
    const decoding = life.first_token_ms !== null && life.last_token_ms > life.first_token_ms;
    const facts = [
      ["Request", h("span", { class: "mono" }, life.request_id)],
      ["Tenant", named(life.tenant)],
      ["Adapter", life.adapter || "base model"],
      life.adapter_digest && ["Its content", h("span", { class: "mono" }, life.adapter_digest.slice(0, 16))],
      ["State", outcome(life)],
      ["First token", ms(life.first_token_ms)],
      ["Total", ms(life.ended_ms ?? life.age_ms)],
      ["Tokens a second", decoding ? ((1000 * (life.completion_tokens - 1)) / (life.last_token_ms - life.first_token_ms)).toFixed(1) : NONE],
      ["On the worker", life.ended_ms === null ? NONE : `adapter ${ms(life.adapter_wait_ms)}, prompt ${ms(life.prefill_ms)}, answer ${ms(life.decode_ms)}`],
      life.resumes > 0 && ["Went on at another worker", `${life.resumes} ${life.resumes > 1 ? "times" : "time"}, ${ms(life.resume_ms)} without tokens`],
      life.swaps !== null && ["Swapped out, computed again", life.ended_ms === null ? NONE : `${life.swaps} and ${life.evictions} times`],
    ].filter(Boolean);
    show(box, h("div", { class: "card life" },
      h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))),
      stack("Where the time went", parts, undefined, true),
      h("ul", { class: "legend" }, parts.map((each) => h("li", null, h("span", { class: "swatch", style: { background: each.paint } }), each.name, h("span", { class: "soft" }, ` ${ms(each.value)}`)))),
      h("ol", { class: "steps" }, events.map(([at, name, more]) => h("li", null, h("span", { class: "num soft" }, `+${ms(at)}`), h("span", null, h("strong", null, name), more && h("span", { class: "soft" }, ` ${more}`)))))));
  }

  return { element, refresh, everyS: 1 };
}
