// Adapters: their versions, and how often their weights were where they were needed.

import { data } from "/console/api.js";
import { bytes, clock, count, day, h, know, legend, ms, named, NONE, part, show, stack, sum, table } from "/console/dom.js";

export const title = "Adapters";

const FOUND = [
  { name: "on the device", of: "on_device", paint: "var(--c2)" },
  { name: "in host memory", of: "on_host", paint: "var(--c1)" },
  { name: "in the store", of: "in_store", paint: "var(--c5)" },
];

export function page(session) {
  const box = h("div", { class: "card" });
  const sorting = { by: session.operator ? 4 : 3, down: true };
  const open = new Set();
  let told = null;
  const element = h("div", null,
    h("div", { class: "head" }, h("h1", null, "Adapters"),
      h("p", { class: "soft small" }, `Hits: requests that found the adapter's weights on the device when they came to their worker, of those through router ${session.router} since ${clock(session.began_unix_s)}.`)),
    box);

  async function refresh() {
    told = await data("adapters");
    know(session.tenants.slice(0, 8));
    draw();
  }

  const uses = (row) => row.versions.map((each) => each.use).filter(Boolean);
  const total = (row, name) => sum(uses(row).map((each) => each[name]));
  const hits = (row) => (total(row, "requests") ? total(row, "on_device") / total(row, "requests") : null);
  const misses = (row) => total(row, "requests") - total(row, "on_device");
  const version = (row) => row.versions.find((each) => each.number === row.in_force);

  const verdict = (each) => (each.state ? `, ${each.state}: not served` : "");

  function draw() {
    const columns = [
      session.operator && { name: "Tenant", key: (row) => row.tenant, cell: (row) => named(row.tenant) },
      { name: "Adapter", key: (row) => row.name, cell: (row) => row.name },
      { name: "Version", key: (row) => row.in_force, cell: (row) => versions(row) },
      { name: "Size", num: true, key: (row) => version(row).size_bytes, cell: (row) => [bytes(version(row).size_bytes), h("span", { class: "soft" }, ` r${version(row).max_lora_rank}`)] },
      { name: "Requests", num: true, key: (row) => total(row, "requests"), cell: (row) => count(total(row, "requests")) },
      { name: "Hit rate", num: true, key: hits, cell: (row) => part(hits(row)) },
      { name: "Found", key: hits, cell: (row) => stack("Found", FOUND.map((each) => ({ ...each, value: total(row, each.of) }))) },
      { name: "Mean wait when cold", num: true, key: (row) => (misses(row) ? total(row, "waited_ms") / misses(row) : null), cell: (row) => (misses(row) ? ms(total(row, "waited_ms") / misses(row)) : NONE) },
      { name: "Used last", num: true, key: (row) => Math.max(0, ...uses(row).map((each) => each.used_unix_s)), cell: (row) => (uses(row).length ? clock(Math.max(...uses(row).map((each) => each.used_unix_s))) : NONE) },
    ].filter(Boolean);
    show(box, told.adapters.length ? [table("Adapters", columns, told.adapters, sorting, draw), legend(FOUND)] : h("p", { class: "soft" }, "No adapter is registered. `manylora adapter add` adds one."),
      told.left_out ? h("p", { class: "soft small" }, `${told.left_out} more are left out; those that were used last are shown.`) : null);
  }

  function versions(row) {
    const key = `${row.tenant}/${row.name}`;
    const rollout = row.rollout ? `, ${row.rollout.percent} % to @${row.rollout.to}` : "";
    const details = h("details", { open: open.has(key) && true, ontoggle: () => (details.open ? open.add(key) : open.delete(key)) },
      h("summary", { "data-focus": `versions ${key}` }, `@${row.in_force}${verdict(version(row))}${rollout}`),
      row.versions.map((each) => h("p", { class: "small" },
        `@${each.number} `, h("span", { class: "mono soft" }, each.uid.slice(0, 12)), `, rank ${each.max_lora_rank}, ${bytes(each.size_bytes)}, added ${day(each.created_unix_s)}${verdict(each)}`,
        each.retired_unix_s ? `, retired ${day(each.retired_unix_s)}` : "", each.use ? `, ${count(each.use.requests)} requests, ${part(each.use.on_device / each.use.requests)} hits` : "")));
    return details;
  }

  return { element, refresh, everyS: 5 };
}
