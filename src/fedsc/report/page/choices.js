"use strict";
// What the runs say, what the person has chosen, and which runs that leaves.

let data = JSON.parse(document.getElementById("data").textContent);

const choice = {
  dataset: null,
  setting: null,
  metric: "accuracy",
  hidden: new Set(), // methods
  sort: { column: "last", descending: true },
  level: null, // accuracy whose cost the table shows; null: the highest that all reach
};

const byId = (id) => document.getElementById(id);
const unique = (values) => [...new Set(values)];
const runsOf = (indices) => indices.map((index) => data.runs[index]);

// Groups of the chosen data set and setting: one per method, over seeds.
function groups() {
  return data.groups
    .filter((g) => g.dataset === choice.dataset && g.setting === choice.setting)
    .sort((a, b) => place(a.method) - place(b.method));
}

const visibleGroups = () => groups().filter((g) => !choice.hidden.has(g.method));
const visibleRuns = () => visibleGroups().flatMap((group) => runsOf(group.runs));

function metricInfo(name = choice.metric) {
  return data.metrics.find((m) => m.name === name) ?? { name, title: name, unit: "", what: "" };
}

const UNITS = { "%": 100, MB: 1e-6 };
const inUnit = (value, unit) => (value === null || value === undefined ? null : value * (UNITS[unit] ?? 1));

// Metrics that any run of the chosen setting has.
function metrics() {
  const runs = groups().flatMap((group) => runsOf(group.runs));
  return data.metrics.filter((m) => runs.some((run) => m.name in run.series));
}

// A choice that the data no longer offer falls back to the first there is.
function settleChoices() {
  const offered = (wanted, values) => (values.includes(wanted) ? wanted : (values[0] ?? null));
  choice.dataset = offered(choice.dataset, datasets());
  choice.setting = offered(choice.setting, settings());
  choice.metric = offered(choice.metric, metrics().map((m) => m.name));
}

const datasets = () => unique(data.groups.map((g) => g.dataset)).sort();

// The settings with most methods first: they are what a comparison is about.
function settings() {
  const here = data.groups.filter((g) => g.dataset === choice.dataset).map((g) => g.setting);
  const count = (setting) => here.filter((other) => other === setting).length;
  return unique(here).sort((a, b) => count(b) - count(a) || a.localeCompare(b));
}

// Choices live in the address too, so that a link or a reload shows the same.
function readAddress() {
  const found = new URLSearchParams(location.hash.slice(1));
  for (const name of ["dataset", "setting", "metric", "level"]) {
    if (found.has(name)) choice[name] = found.get(name);
  }
  choice.hidden = new Set(found.getAll("hide"));
  if (found.has("sort")) {
    choice.sort = { column: found.get("sort"), descending: !found.has("up") };
  }
}

function writeAddress() {
  const wanted = new URLSearchParams({ dataset: choice.dataset ?? "", setting: choice.setting ?? "" });
  if (choice.metric !== "accuracy") wanted.set("metric", choice.metric ?? "");
  if (choice.level) wanted.set("level", choice.level);
  for (const method of choice.hidden) wanted.append("hide", method);
  if (choice.sort.column !== "last" || !choice.sort.descending) {
    wanted.set("sort", choice.sort.column);
    if (!choice.sort.descending) wanted.set("up", "1");
  }
  history.replaceState(null, "", `#${wanted}`);
}

// A method keeps its colour whatever is filtered, and when others join later.
const places = new Map();

function place(method) {
  for (const name of data.methods) {
    if (!places.has(name)) places.set(name, places.size);
  }
  return places.get(method) ?? 0;
}

const isDark = () => document.documentElement.dataset.theme === "dark";
const palette = () => data.colours[isDark() ? "dark" : "light"];
const colourOf = (method) => palette()[place(method) % palette().length];
const dashOf = (method) => ["solid", "dash", "dot", "dashdot"][Math.floor(place(method) / palette().length) % 4];

// Elements are made from text only: nothing in a run folder is ever read as HTML.
function element(tag, { text, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) made.setAttribute(name, value);
  }
  if (text !== undefined) made.textContent = text;
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Fill a select, keeping what is chosen in it; untouched if its options are the same.
function fillSelect(select, options, wanted = select.value) {
  const key = JSON.stringify(options);
  if (select.dataset.options !== key) {
    select.replaceChildren(...options.map(({ value, text }) => element("option", { value, text })));
    select.dataset.options = key;
  }
  if (options.some(({ value }) => value === wanted)) select.value = wanted;
}

function swatch(method) {
  const made = element("span", { class: "swatch", "aria-hidden": "true" });
  made.style.borderTopColor = colourOf(method);
  made.style.borderTopStyle = { solid: "solid", dash: "dashed" }[dashOf(method)] ?? "dotted";
  return made;
}
