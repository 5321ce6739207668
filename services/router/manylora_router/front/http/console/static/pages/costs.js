// What requests used and what it costs, by the usage ledger: by day, tenant and adapter.

import { get } from "/console/api.js";
import { colour, count, h, know, legend, named, NONE, show, sum, svg, table, tile } from "/console/dom.js";

export const title = "Costs";
export const ofUsage = true;

const MOST_ROWS = 200;
const MOST_NAMES = 7;
const [HEIGHT, TOP, BOTTOM, LEFT] = [170, 8, 22, 64];
const DAY_MS = 86_400_000;
const text = (at) => new Date(at).toISOString().slice(0, 10);

/** Beginning and end in UTC, the end not included; both are midnights. */
const SPANS = {
  "This month": (now) => [Date.UTC(now.getUTCFullYear(), now.getUTCMonth(), 1), Date.UTC(now.getUTCFullYear(), now.getUTCMonth() + 1, 1)],
  "Last month": (now) => [Date.UTC(now.getUTCFullYear(), now.getUTCMonth() - 1, 1), Date.UTC(now.getUTCFullYear(), now.getUTCMonth(), 1)],
  "Last 7 days": (now) => [Math.floor(now / DAY_MS) * DAY_MS - 6 * DAY_MS, Math.floor(now / DAY_MS) * DAY_MS + DAY_MS],
};
const MEASURES = {
  cost: { name: "Cost", of: (row) => row.price },
  tokens: { name: "Tokens", of: (row) => row.prompt_tokens + row.completion_tokens },
};

export function page(session) {
  const tiles = h("div", { class: "tiles" });
  const daysBox = h("section", { class: "card", id: "days" });
  const [tenantsBox, adaptersBox] = [h("div", { class: "card" }), h("div", { class: "card" })];
  const sortings = { tenants: { by: 6, down: true }, adapters: { by: session.operator ? 7 : 6, down: true } };
  const whose = session.operator ? ["tenant"] : [];
  let [span, measure, told, turn] = ["This month", null, null, 0];
  const choose = h("select", { id: "span", onchange: () => { span = choose.value; refresh().catch((error) => show(tiles, h("p", { class: "notice bad" }, error.message))); } },
    Object.keys(SPANS).map((name) => h("option", { value: name }, name)));
  const choice = h("select", { id: "measure", onchange: () => { measure = choice.value; draw(); } },
    Object.entries(MEASURES).map(([name, each]) => h("option", { value: name }, each.name)));
  const element = h("div", null,
    h("div", { class: "head" }, h("h1", null, session.operator ? "Costs" : `Costs of tenant ${session.tenant}`),
      h("p", { class: "soft small" }, "Of the usage ledger, by the day (UTC) on which requests ended. The prices are those of the list that was in force then.")),
    h("div", { class: "row head" }, h("label", null, "Time", choose), h("label", null, "Days show", choice)), tiles, daysBox, session.operator && tenantsBox, adaptersBox);

  async function refresh() {
    const mine = (turn += 1);
    const [since, until] = SPANS[span](new Date());
    const ask = (by) => get(`/v1/usage?by=${by.join(",")}&since=${text(since)}&until=${text(until)}`);
    const [days, adapters] = await Promise.all([ask([...whose, "day"]), ask([...whose, "adapter"])]);
    if (mine !== turn) return;
    told = { since, until, days: days.data, adapters: adapters.data, currency: days.currency ?? "" };
    measure ??= told.currency ? "cost" : "tokens";
    choice.value = measure;
    know(session.tenants.slice(0, 8));
    draw();
  }

  const money = (value) => (told.currency ? `${value.toFixed(value && value < 1 ? 4 : 2)} ${told.currency}` : NONE);

  function grouped(rows, name) {
    const groups = new Map();
    for (const row of rows) groups.set(row[name], [...(groups.get(row[name]) ?? []), row]);
    return [...groups].map(([value, own]) => {
      const of = (field) => sum(own.map((row) => row[field]));
      return { [name]: value, ...Object.fromEntries(["requests", "prompt_tokens", "cached_tokens", "completion_tokens", "price"].map((field) => [field, of(field)])) };
    });
  }

  function draw() {
    if (!told) return;
    const [all] = grouped(told.days.map((row) => ({ ...row, all: "" })), "all");
    show(tiles, tile("Cost", all ? money(all.price) : NONE, "", told.currency ? "" : "there is no price list (--prices)"), tile("Requests", count(all?.requests ?? 0)),
      tile("Prompt tokens", count(all?.prompt_tokens ?? 0), "", `${count(all?.cached_tokens ?? 0)} of them cached`), tile("Completion tokens", count(all?.completion_tokens ?? 0)));
    drawDays();
    if (session.operator) shown(tenantsBox, "Tenants", "tenant", grouped(told.days, "tenant"), sortings.tenants, []);
    shown(adaptersBox, "Adapters", "adapter", told.adapters, sortings.adapters, session.operator ? [{ name: "Tenant", key: (row) => row.tenant, cell: (row) => named(row.tenant) }] : []);
  }

  function shown(box, caption, name, rows, sorting, before) {
    const most = [...rows].sort((a, b) => b.price - a.price || b.completion_tokens - a.completion_tokens).slice(0, MOST_ROWS);
    const number = (title, field) => ({ name: title, num: true, key: (row) => row[field], cell: (row) => count(row[field]) });
    const columns = [
      ...before,
      { name: caption.slice(0, -1), key: (row) => row[name], cell: (row) => (name === "tenant" ? named(row.tenant) : row.adapter || h("span", { class: "soft" }, "base model")) },
      number("Requests", "requests"),
      number("Prompt tokens", "prompt_tokens"),
      number("Of them cached", "cached_tokens"),
      number("Completion tokens", "completion_tokens"),
      { name: "Share of tokens", num: true, key: MEASURES.tokens.of, cell: (row) => `${((100 * MEASURES.tokens.of(row)) / Math.max(1, sum(rows.map(MEASURES.tokens.of)))).toFixed(1)} %` },
      { name: "Cost", num: true, key: (row) => row.price, cell: (row) => money(row.price) },
    ];
    show(box, rows.length ? table(caption, columns, most, sorting, draw) : h("p", { class: "soft" }, "Nothing was used in this time."),
      rows.length > most.length && h("p", { class: "soft small" }, `${rows.length - most.length} more are left out; the most costly are shown. \`manylora usage\` has all.`));
  }

  function drawDays() {
    const of = MEASURES[measure].of;
    const days = [];
    for (let at = told.since; at < told.until; at += DAY_MS) days.push(text(at));
    const names = grouped(told.days.map((row) => ({ ...row, tenant: row.tenant ?? session.tenant })), "tenant").sort((a, b) => of(b) - of(a)).map((each) => each.tenant);
    const kept = names.slice(0, MOST_NAMES);
    const series = [...kept.map((name) => ({ name, paint: colour(name) })), ...(names.length > MOST_NAMES ? [{ name: "others", paint: "var(--other)" }] : [])];
    const value = (day, name) => sum(told.days.filter((row) => row.day === day && (name === "others" ? !kept.includes(row.tenant) : !row.tenant || row.tenant === name)).map(of));
    const parts = days.map((day) => series.map((each) => ({ ...each, value: value(day, each.name) })));
    const most = Math.max(...parts.map((each) => sum(each.map((part) => part.value))), 0) || 1;
    const width = 28;
    const whole = LEFT + days.length * width;
    const said = (amount) => (measure === "cost" ? money(amount) : count(amount));
    const bars = days.map((day, index) => {
      let y = HEIGHT - BOTTOM;
      const total = sum(parts[index].map((part) => part.value));
      return svg("g", null, svg("title", null, `${day}: ${said(total)}`),
        parts[index].filter((part) => part.value > 0).map((part) => {
          const height = ((HEIGHT - BOTTOM - TOP) * part.value) / most;
          return svg("rect", { x: LEFT + index * width + 3, y: (y -= height), width: width - 6, height, style: { fill: part.paint } });
        }),
        svg("text", { class: "axis", x: LEFT + (index + 0.5) * width, y: HEIGHT - 6, "text-anchor": "middle" }, day.slice(8)));
    });
    const marks = [0, 1].map((share) => svg("text", { class: "axis", x: LEFT - 6, y: share ? TOP + 8 : HEIGHT - BOTTOM, "text-anchor": "end" }, said(share * most)));
    const spoken = days.map((day, index) => [day, sum(parts[index].map((part) => part.value))]).filter(([, amount]) => amount).map(([day, amount]) => `${day} ${said(amount)}`).join(", ");
    show(daysBox, h("h2", null, `${MEASURES[measure].name} by day`), h("div", { class: "scroll chart", tabindex: 0 },
      svg("svg", { viewBox: `0 0 ${whole} ${HEIGHT}`, role: "img", "aria-label": `${MEASURES[measure].name} by day: ${spoken || "nothing"}` }, marks, bars)),
      session.operator && series.length ? legend(series) : null);
  }

  return { element, refresh, everyS: 60 };
}
