// Each worker's slots, and whose KV and adapters are in its memory.

import { data } from "/console/api.js";
import { bytes, colour, count, h, know, legend, NONE, part, rate, show, stack, sum } from "/console/dom.js";

export const title = "Workers";
export const forOperators = true;

export function page(session) {
  const box = h("div");
  let before = null;
  const element = h("div", null,
    h("div", { class: "head" }, h("h1", null, "Workers"),
      h("p", { class: "soft small" }, "Memory by tenant, as each worker reported it last. Cached prefixes of requests that have ended count as free: they go when room is needed.")),
    box);

  async function refresh() {
    const status = await data("status");
    know(session.tenants.slice(0, 8));
    const now = { at: performance.now() / 1000, tokens: Object.fromEntries(status.workers.map((each) => [each.worker_id, each.counters?.generated_tokens ?? 0])) };
    const speed = (id) => {
      const more = before && id in before.tokens ? now.tokens[id] - before.tokens[id] : -1;
      return more >= 0 ? more / (now.at - before.at) : null;
    };
    const cards = status.workers.map((worker) => card(worker, speed(worker.worker_id)));
    if (!before || now.at - before.at > 2) before = now;
    show(box, cards.length ? h("div", { class: "grid" }, cards) : h("p", { class: "card soft" }, "No worker is registered."));
  }

  function card(worker, speed) {
    const total = worker.kv_blocks_total * worker.kv_block_bytes;
    const held = (worker.kv_blocks_total - worker.kv_blocks_free) * worker.kv_block_bytes;
    const parts = (name) => worker.tenants.filter((each) => each[name]).map((each) => ({ name: each.tenant_id || "others", paint: colour(each.tenant_id), value: each[name], more: bytes(each[name]) }));
    const kv = parts("kv_bytes");
    const rest = held - sum(kv.map((each) => each.value));
    if (rest > 0 && total) kv.push({ name: "shared or leaving", paint: "var(--other)", value: rest, more: bytes(rest) });
    const adapters = parts("adapter_bytes");
    const adapterBytes = sum(adapters.map((each) => each.value));
    const seen = new Map([...kv, ...adapters].map((each) => [each.name, { name: each.name, paint: each.paint }]));
    const state = worker.kept_out ? ["bad", "kept out"] : !worker.connected ? ["bad", "not connected"] : worker.draining ? ["warn", "draining"] : ["good", "serving"];
    return h("section", { class: "card" },
      h("h2", null, worker.worker_id, " ", h("span", { class: `small ${state[0]}` }, state[1])),
      h("p", { class: "soft small" }, `${worker.device || "device unknown"} at ${worker.address}`),
      worker.kept_out && h("p", { class: "notice bad" }, worker.kept_out),
      bar("Slots", `${count(Math.min(worker.running, worker.sequence_slots))} of ${count(worker.sequence_slots)} in use${worker.running > worker.sequence_slots ? `, ${count(worker.running - worker.sequence_slots)} more wait for one` : ""}`,
        stack("Slots", [{ name: "in use", value: Math.min(worker.running, worker.sequence_slots), paint: "var(--soft)" }], worker.sequence_slots, true)),
      bar("KV memory", total ? `${bytes(held)} of ${bytes(total)} (${part(held / total)})` : NONE, stack("KV memory", kv, total, true)),
      bar("Adapter memory", worker.device_adapter_bytes ? `${bytes(adapterBytes)} of ${bytes(worker.device_adapter_bytes)}` : bytes(adapterBytes), stack("Adapter memory", adapters, worker.device_adapter_bytes, true)),
      seen.size ? legend([...seen.values()]) : h("p", { class: "soft small" }, "No tenant holds memory here."),
      h("p", { class: "soft small" }, `${rate(speed)} tokens/s; ${count(worker.adapters_on_device)} adapters on the device, ${count(worker.adapters_on_host)} in host memory.`));
  }

  const bar = (name, said, drawn) => h("div", null, h("p", { class: "small" }, h("strong", null, name), h("span", { class: "soft" }, ` ${said}`)), drawn);

  return { element, refresh, everyS: 3 };
}
