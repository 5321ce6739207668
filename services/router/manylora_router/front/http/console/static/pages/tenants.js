// Who gets how much, what would be due, and who is how far ahead.

import { data } from "/console/api.js";
import { bytes, colour, count, h, know, ms, named, NONE, part, rate, seconds, show, stack, sum, table, words } from "/console/dom.js";

export const title = "Tenants";

export function page(session) {
  const sharesBox = h("div");
  const tableBox = h("div", { class: "card" });
  const more = h("div");
  const sorting = { by: session.operator ? 3 : 0, down: session.operator };
  const levels = { by: 0, down: false };
  const whose = session.operator ? [{ name: "Tenant", key: (row) => row.tenant_id, cell: (row) => named(row.tenant_id) }] : [];
  let before = null;
  let rows = [];
  let flows = [];
  const element = h("div", null,
    h("div", { class: "head" }, h("h1", null, session.operator ? "Tenants" : `Tenant ${session.tenant}`),
      h("p", { class: "soft small" }, session.operator
        ? "Share: of the weighted tokens that the cluster served since the last look. Due: by weight, among the flows that have work; who asks for less than is due gets what it asks for, and others share the rest. Debt: weighted tokens that a flow is ahead of the one that is served next; others go first until they have come as far."
        : "What your own requests use and wait for.")),
    sharesBox, tableBox, more);

  async function refresh() {
    const status = await data("status");
    know(session.tenants.slice(0, 8));
    const now = { at: performance.now() / 1000, epoch: status.scheduler.epoch, served: {} };
    for (const each of status.scheduler.flows) now.served[`${each.tenant_id} ${each.qos_class}`] = each.served_cost;
    const passed = before && before.epoch === now.epoch ? now.at - before.at : null;
    const got = (flow) => {
      const key = `${flow.tenant_id} ${flow.qos_class}`;
      return passed && key in before.served ? Math.max(0, flow.served_cost - before.served[key]) / passed : null;
    };
    const kv = Object.fromEntries(status.scheduler.kv.map((each) => [each.tenant_id, each.device_bytes]));
    const adapters = Object.fromEntries(status.scheduler.adapters.map((each) => [each.tenant_id, each]));
    const setbacks = Object.fromEntries(status.scheduler.setbacks.map((each) => [each.tenant_id, each]));
    const slo = Object.fromEntries(status.slos.map((each) => [`${each.tenant_id} ${each.qos_class}`, each]));
    const weights = sum(status.scheduler.flows.map((each) => each.weight));
    flows = status.scheduler.flows.map((each) => ({ ...each, rate: got(each), slo: slo[`${each.tenant_id} ${each.qos_class}`] }));
    const rates = sum(flows.map((each) => each.rate));
    const tenants = [...new Set([...flows.map((each) => each.tenant_id), ...Object.keys(kv), ...Object.keys(adapters), ...status.slos.map((each) => each.tenant_id)])];
    rows = tenants.map((tenant) => {
      const own = flows.filter((each) => each.tenant_id === tenant);
      const known = own.some((each) => each.rate !== null);
      const ttft = status.slos.filter((each) => each.tenant_id === tenant && each.ttft_p95_ms !== null).map((each) => each.ttft_p95_ms);
      return {
        tenant,
        rate: known ? sum(own.map((each) => each.rate)) : own.length ? null : 0,
        share: known && rates ? sum(own.map((each) => each.rate)) / rates : null,
        due: weights && own.length ? sum(own.map((each) => each.weight)) / weights : null,
        debt: sum(own.map((each) => each.debt_cost)),
        running: sum(own.map((each) => each.running)),
        queued: sum(own.map((each) => each.queued)),
        wait: Math.max(0, ...own.map((each) => each.oldest_wait_s)),
        ttft: ttft.length ? Math.max(...ttft) : null,
        kv: kv[tenant] ?? 0,
        adapters: adapters[tenant]?.device_bytes ?? 0,
        setbacks: setbacks[tenant],
      };
    });
    if (passed === null || passed > 2) before = now;
    draw(status);
  }

  function draw(status) {
    if (session.operator) {
      const parts = [...rows].sort((a, b) => (a.tenant < b.tenant ? -1 : 1)).map((each) => ({ name: each.tenant, paint: colour(each.tenant), ...each }));
      show(sharesBox, h("div", { class: "card" }, h("h2", null, "Shares now"),
        h("div", { class: "steps" },
          h("p", { class: "small soft" }, "got"), stack("Share that each tenant got", parts.map((each) => ({ ...each, value: each.share })), 1, true),
          h("p", { class: "small soft" }, "due by weight, of those with work"), stack("Share that is due to each tenant", parts.map((each) => ({ ...each, value: each.due })), 1, true)),
        h("ul", { class: "legend" }, parts.map((each) => h("li", null, named(each.name), h("span", { class: "soft" }, ` ${part(each.share)}, due ${part(each.due)}`))))));
    }
    const mostDebt = Math.max(1, ...rows.map((each) => each.debt));
    const columns = [
      session.operator && { name: "Tenant", key: (row) => row.tenant, cell: (row) => named(row.tenant) },
      session.operator && { name: "Share", title: "bar: got; mark: due", key: (row) => row.share, cell: (row) => pair(row) },
      session.operator && { name: "Debt", num: true, title: "weighted tokens ahead of the flow that is next", key: (row) => row.debt, cell: (row) => h("div", { class: "with-bar" }, stack("Debt", [{ name: "debt", value: row.debt, paint: colour(row.tenant) }], mostDebt), h("span", null, count(row.debt))) },
      { name: "Weighted tokens/s", num: true, key: (row) => row.rate, cell: (row) => rate(row.rate) },
      { name: "Running", num: true, key: (row) => row.running, cell: (row) => count(row.running) },
      { name: "Queued", num: true, key: (row) => row.queued, cell: (row) => count(row.queued) },
      { name: "Oldest wait", num: true, key: (row) => row.wait, cell: (row) => seconds(row.wait) },
      { name: "TTFT p95", num: true, title: "last five minutes, slowest class", key: (row) => row.ttft, cell: (row) => ms(row.ttft) },
      { name: "KV", num: true, key: (row) => row.kv, cell: (row) => bytes(row.kv) },
      { name: "Adapters", num: true, title: "memory on devices", key: (row) => row.adapters, cell: (row) => bytes(row.adapters) },
      session.operator && { name: "Preempted", num: true, key: (row) => row.setbacks?.preemptions ?? 0, cell: (row) => count(row.setbacks?.preemptions ?? 0) },
    ].filter(Boolean);
    show(tableBox, rows.length ? table(session.operator ? "By tenant" : "Now", columns, rows, sorting, () => draw(status)) : h("p", { class: "soft" }, "Nobody has requests, KV or adapters in memory now."),
      status.left_out ? h("p", { class: "soft small" }, `${status.left_out} tenants with less work are left out.`) : null);
    show(more, flowsCard(status), quotaCard(status), pinsCard(status), noisyCard(status));
  }

  function flowsCard(status) {
    const slos = status.slos.map((each) => ({ ...each, flow: flows.find((flow) => flow.tenant_id === each.tenant_id && flow.qos_class === each.qos_class) }));
    if (!slos.length) return null;
    const columns = [
      ...whose,
      { name: "Class", key: (row) => row.qos_class, cell: (row) => row.qos_class },
      { name: "Running", num: true, key: (row) => row.flow?.running ?? 0, cell: (row) => count(row.flow?.running ?? 0) },
      { name: "Queued", num: true, key: (row) => row.flow?.queued ?? 0, cell: (row) => count(row.flow?.queued ?? 0) },
      { name: "TTFT p50", num: true, key: (row) => row.ttft_p50_ms, cell: (row) => ms(row.ttft_p50_ms) },
      { name: "TTFT p95", num: true, key: (row) => row.ttft_p95_ms, cell: (row) => ms(row.ttft_p95_ms) },
      { name: "Target", num: true, key: (row) => row.ttft_p95_target_ms, cell: (row) => [ms(row.ttft_p95_target_ms), row.ttft_met === null ? "" : row.ttft_met ? h("span", { class: "good" }, " met") : h("span", { class: "bad" }, " missed")] },
      { name: "Per token p50", num: true, key: (row) => row.tpot_p50_ms, cell: (row) => ms(row.tpot_p50_ms) },
      { name: "Requests, 1 h", num: true, key: (row) => row.requests, cell: (row) => count(row.requests) },
      { name: "Good", num: true, key: (row) => row.availability, cell: (row) => part(row.availability) },
    ];
    return h("div", { class: "card" }, table("Service by class", columns, slos, levels, () => draw(status)));
  }

  const quotas = { by: 0, down: false };
  function quotaCard(status) {
    const rows_ = status.scheduler.quotas.filter((each) => each.level_tokens !== null);
    if (!rows_.length) return null;
    const columns = [
      ...whose,
      { name: "Class", key: (row) => row.qos_class, cell: (row) => row.qos_class },
      { name: "Requests", num: true, key: (row) => row.requests, cell: (row) => count(row.requests) },
      { name: "Leased tokens", num: true, key: (row) => row.leased_tokens, cell: (row) => count(row.leased_tokens) },
      { name: "Used tokens", num: true, key: (row) => row.settled_tokens, cell: (row) => count(row.settled_tokens) },
      { name: "Left in bucket", num: true, key: (row) => row.level_tokens, cell: (row) => h("span", { class: row.level_tokens < 0 ? "bad" : "" }, count(row.level_tokens)) },
    ];
    return h("div", { class: "card" }, table("Token quotas", columns, rows_, quotas, () => draw(status)));
  }

  const pins = { by: 0, down: false };
  function pinsCard(status) {
    const rows_ = status.scheduler.adapters.flatMap((each) => each.pins.map((pin) => ({ ...pin, tenant_id: each.tenant_id })));
    if (!rows_.length) return null;
    const columns = [
      ...whose,
      { name: "Pinned adapter", key: (row) => row.name, cell: (row) => row.name },
      { name: "On devices", num: true, key: (row) => row.on_device, cell: (row) => `${row.on_device} of ${row.workers}` },
      { name: "Problem", key: (row) => row.problem, cell: (row) => (row.problem ? h("span", { class: "bad" }, row.problem) : NONE) },
    ];
    return h("div", { class: "card" }, table("Pins", columns, rows_, pins, () => draw(status)));
  }

  const noisy = { by: 0, down: false };
  function noisyCard(status) {
    if (!status.scheduler.neighbours.length) return null;
    const columns = [
      ...whose,
      { name: "Others suffer from its", key: (row) => row.kind, cell: (row) => words(row.kind) },
      { name: "Worker", key: (row) => row.worker_id, cell: (row) => row.worker_id || "all" },
      { name: "Evidence", key: () => 0, cell: (row) => Object.entries(row.evidence).map(([name, value]) => `${words(name)} ${rate(value)}`).join(", ") },
    ];
    return h("div", { class: "card" }, table("Noisy neighbours", columns, status.scheduler.neighbours, noisy, () => draw(status)));
  }

  function pair(row) {
    const most = Math.max(0.01, ...rows.flatMap((each) => [each.share ?? 0, each.due ?? 0]));
    return h("div", { class: "pair", role: "img", "aria-label": `got ${part(row.share)}, due ${part(row.due)}`, title: `got ${part(row.share)}, due ${part(row.due)}` },
      h("span", { class: "is", style: { width: `${(100 * (row.share ?? 0)) / most}%`, background: colour(row.tenant) } }),
      row.due !== null && h("span", { class: "due", style: { left: `${(100 * row.due) / most}%` } }));
  }

  return { element, refresh, everyS: 3 };
}
