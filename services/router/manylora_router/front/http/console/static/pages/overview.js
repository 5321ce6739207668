// Now, and the last hour of throughput, first tokens and queues.

import { data } from "/console/api.js";
import { Chart } from "/console/charts.js";
import { clock, colour, count, h, know, ms, rate, seconds, show, span, sum, tile } from "/console/dom.js";

export const title = "Overview";

const last = (values) => values[values.length - 1] ?? null;
const perSecond = (values, step) => values.map((value) => (value === null ? null : value / step));

export function page(session) {
  const tiles = h("div", { class: "tiles" });
  const note = h("p", { class: "soft small" });
  const alarms = h("div");
  const charts = {
    tokens: new Chart("Output tokens", "per second", { stacked: true, text: rate }),
    ttft: new Chart("Time to first token", "milliseconds", { text: ms }),
    standing: new Chart("Requests now", "waiting and running", { stacked: true, text: rate }),
    requests: new Chart("Requests that ended", "per minute", { stacked: true, text: rate }),
    wait: new Chart("Wait in the queue, 95th percentile", "milliseconds", { text: ms }),
    prompts: new Chart("Prompt tokens", "per second", { stacked: true, text: rate }),
  };
  const element = h("div", null,
    h("div", { class: "head" }, h("h1", null, "Overview"), note),
    alarms, tiles, h("div", { class: "grid" }, Object.values(charts).map((each) => each.element)));

  async function refresh() {
    const [status, history] = await Promise.all([data("status"), data("history")]);
    know(session.tenants.slice(0, 8));
    drawTiles(status, history);
    drawCharts(history);
  }

  function drawTiles(status, history) {
    const { series, step_s: step } = history;
    const flows = status.scheduler.flows;
    const late = Math.max(0, ...flows.map((each) => each.oldest_wait_s));
    const ttft = status.slos.filter((each) => each.ttft_p95_ms !== null).map((each) => each.ttft_p95_ms);
    const up = status.workers.filter((each) => each.connected && !each.kept_out);
    const overload = status.scheduler.overload;
    const others = status.routers.filter((each) => each.router_id !== session.router);
    show(note, `${status.base_model || "no model yet"}. Charts: requests through router ${session.router}, since ${clock(history.began_unix_s)} (${span(history.ended_unix_s - history.began_unix_s)})`,
      others.length ? `; ${others.length} other router${others.length > 1 ? "s have" : " has"} their own: ${others.map((each) => each.address).join(", ")}.` : ".");
    show(tiles,
      tile("Output tokens", rate(series.completion_tokens.length ? last(series.completion_tokens) / step : null), "/s", `last ${step} s`),
      tile("First token, p95", ms(ttft.length ? Math.max(...ttft) : null), "", "last 5 min, slowest class"),
      tile("Running", count(sum(flows.map((each) => each.running))), "", session.operator ? "in the whole cluster" : "of this tenant"),
      tile("Queued", count(sum(flows.map((each) => each.queued))), "", `oldest waits ${seconds(late)}`),
      session.operator && tile("Workers", `${up.length}`, `of ${status.workers.length}`, `${sum(up.map((each) => each.sequence_slots))} slots`),
      tile(session.operator ? "Tenants" : "Adapters", count(session.operator ? status.tenants : status.adapters), "", session.operator ? `${count(status.adapters)} adapters` : "registered"),
      tile("Overload", overload?.level ? `${overload.level}` : "none", overload?.level ? "of 128" : "", overload?.level ? `gives up ${overload.rung.replaceAll("_", " ")}` : "nothing is given up"));
    const told = [];
    if (!status.scheduler.reachable) told.push("No scheduler leads: what runs goes on, new requests wait.");
    if (session.operator && !up.length) told.push("No worker is connected.");
    for (const each of status.workers.filter((worker) => worker.kept_out)) told.push(`Worker ${each.worker_id} is kept out: ${each.kept_out}`);
    for (const each of status.circuits) told.push(`Requests of ${each.tenant_id} are refused because they kept failing (${each.whole_tenant ? "all of them" : each.adapter_version ? `adapter ${each.adapter_version.split("+").map((part) => part.slice(0, 12)).join("+")}` : "base model"}); tried again in ${seconds(each.retry_after_s)}.`);
    if (status.quarantined_prompts) told.push(`${status.quarantined_prompts} prompts are quarantined: workers failed while they ran them.`);
    if (status.scheduler.etcd?.full) told.push("etcd is full and takes no changes.");
    show(alarms, told.map((text) => h("p", { class: "notice", role: "status" }, text)));
  }

  function drawCharts(history) {
    const { series, step_s: step, tenants } = history;
    const times = { ended: history.ended_unix_s, step, most: history.most_steps };
    const byTenant = (name) => {
      const own = (session.operator ? tenants : [{ tenant: session.tenant, series }]).map((each) => ({
        name: each.tenant,
        paint: colour(each.tenant),
        values: perSecond(each.series[name], step),
      }));
      const rest = series[name].map((value, i) => Math.max(0, (value ?? 0) / step - sum(own.map((each) => each.values[i]))));
      return rest.some((value) => value > 0.05) ? [...own, { name: "others", paint: "var(--other)", values: rest }] : own.length ? own : [{ name: "all", paint: "var(--c0)", values: rest }];
    };
    charts.tokens.update(byTenant("completion_tokens"), times);
    charts.prompts.update(byTenant("prompt_tokens"), times);
    charts.ttft.update([
      { name: "95th percentile", paint: "var(--c1)", values: series.ttft_p95_ms },
      { name: "median", paint: "var(--c0)", values: series.ttft_p50_ms, dash: "5 3" },
    ], times);
    charts.wait.update([{ name: "95th percentile", paint: "var(--c0)", values: series.queue_p95_ms }], times);
    charts.standing.update([
      { name: "running", paint: "var(--c2)", values: series.running },
      { name: "waiting", paint: "var(--c1)", values: series.waiting },
    ], times);
    const perMinute = (values) => values.map((value) => (value === null ? null : (60 * value) / step));
    const done = series.requests.map((value, i) => (value === null ? null : value - series.failed[i] - series.rejected[i]));
    charts.requests.update([
      { name: "completed", paint: "var(--c0)", values: perMinute(done) },
      { name: "failed or cancelled", paint: "var(--c5)", values: perMinute(series.failed) },
      { name: "refused", paint: "var(--c4)", values: perMinute(series.rejected) },
    ], times);
  }

  return { element, refresh, everyS: 5 };
}
