// Elements and words. Whatever comes from outside becomes text: nothing here reads markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const svg = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

/** Shows `children` in place of what `box` had; who had the focus by its data-focus has it again. */
export function show(box, ...children) {
  const focus = box.contains(document.activeElement) ? document.activeElement.dataset?.focus : undefined;
  const scrolled = [...box.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  box.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  [...box.querySelectorAll(".scroll")].forEach((each, index) => (each.scrollLeft = scrolled[index] ?? 0));
  if (focus) [...box.querySelectorAll("[data-focus]")].find((each) => each.dataset.focus === focus)?.focus();
}

export const NONE = "–";
const few = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => (value === null || value === undefined ? NONE : whole.format(value));
export const rate = (value) => (value === null || value === undefined ? NONE : (Math.abs(value) < 100 ? few : whole).format(value));
/** Not 0 and not 100 where it is not quite. */
export function part(value) {
  if (value === null || value === undefined) return NONE;
  const isNearEnd = (value > 0 && value < 0.1) || (value > 0.9 && value < 1);
  return `${isNearEnd ? Math.min(99.9, Math.max(0.1, 100 * value)).toFixed(1) : Math.round(100 * value)} %`;
}
export function ms(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 10_000) return `${few.format(value / 1000)} s`;
  return value > 0 && value < 10 ? `${value.toFixed(1)} ms` : `${whole.format(value)} ms`;
}
export const seconds = (value) => (value ? ms(1000 * value) : "0 s");
export function bytes(value) {
  if (!value) return "0 B";
  const power = Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${(value / 1024 ** power).toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
export const clock = (unix, withSeconds = true) =>
  new Date(1000 * unix).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: withSeconds ? "2-digit" : undefined });
export const day = (unix) => (unix ? new Date(1000 * unix).toISOString().slice(0, 16).replace("T", " ") + " UTC" : NONE);
export function span(s) {
  if (s < 90) return `${Math.round(s)} s`;
  return s < 5400 ? `${Math.round(s / 60)} min` : `${few.format(s / 3600)} h`;
}
export const words = (name) => name.replaceAll("_", " ");
export const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

/** A tenant's colour: the same one on every page. */
const seen = new Map();
export function know(tenants) {
  for (const tenant of tenants) if (!seen.has(tenant)) seen.set(tenant, seen.size);
}
export function colour(tenant) {
  if (!tenant) return "var(--other)";
  know([tenant]);
  return `var(--c${seen.get(tenant) % 8})`;
}
export const swatch = (paint) => h("span", { class: "swatch", style: { background: paint }, "aria-hidden": "true" });
export const named = (tenant) => [swatch(colour(tenant)), tenant || "others"];

/**
 * A table whose columns sort. columns: {name, key: row => value to sort by, cell: row => what is shown, num}
 * sorting: {by, down}, which is kept by who shows the table again.
 */
export function table(caption, columns, rows, sorting, again) {
  const column = columns[sorting.by] ?? columns[0];
  const order = [...rows].sort((a, b) => {
    const [x, y] = [column.key(a), column.key(b)];
    if (x === y) return 0;
    if (x === null || x === undefined) return 1;
    if (y === null || y === undefined) return -1;
    return (x < y ? -1 : 1) * (sorting.down ? -1 : 1);
  });
  const head = columns.map((each, index) => {
    const isBy = index === sorting.by;
    const press = () => {
      Object.assign(sorting, { by: index, down: isBy ? !sorting.down : Boolean(each.num) });
      again();
    };
    const arrow = isBy ? (sorting.down ? " ▾" : " ▴") : "";
    return h("th", { scope: "col", class: each.num && "num", "aria-sort": isBy && (sorting.down ? "descending" : "ascending"), title: each.title },
      h("button", { type: "button", onclick: press, "data-focus": `${caption} ${each.name}` }, each.name + arrow));
  });
  const body = order.map((row) => h("tr", null, columns.map((each) => h("td", { class: each.num && "num" }, each.cell(row)))));
  return h("div", { class: "scroll" }, h("table", null, h("caption", null, caption), h("thead", null, h("tr", null, head)), h("tbody", null, body)));
}

/** Parts of a whole, from left to right. parts: {name, value, paint} */
export function stack(label, parts, whole_, tall = false) {
  const total = Math.max(whole_ ?? 0, sum(parts.map((each) => each.value))) || 1;
  const said = parts.filter((each) => each.value).map((each) => `${each.name} ${part(each.value / total)}`).join(", ");
  return h("div", { class: tall ? "stack tall" : "stack", role: "img", "aria-label": `${label}: ${said || "nothing"}`, title: said || "nothing" },
    parts.filter((each) => each.value).map((each) => h("span", { style: { width: `${(100 * each.value) / total}%`, background: each.paint } })));
}
export const legend = (parts) =>
  h("ul", { class: "legend" }, parts.map((each) => h("li", null, swatch(each.paint), each.name, each.more && h("span", { class: "soft" }, ` ${each.more}`))));
export const tile = (name, value, unit, more) =>
  h("dl", { class: "tile" }, h("dt", null, name), h("dd", null, value, unit && h("small", null, ` ${unit}`)), more && h("p", null, more));
