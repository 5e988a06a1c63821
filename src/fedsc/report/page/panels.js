// The figures: each function draws one panel from the runs in view, or hides it.

const sum = (values) => values.reduce((a, b) => a + b, 0);
const mean = (values) => (values.includes(null) ? null : sum(values) / values.length);
const shared = (lists) => lists[0].filter((value) => lists.every((list) => list.includes(value)));

// A metric by round: mean, lowest and highest over the runs; null where a run has no value.
function byRound(runs, metric) {
  const having = runs.filter((run) => metric in run.series);
  if (!having.length) return null;
  const rounds = shared(having.map((run) => run.round));
  const unit = metricInfo(metric).unit;
  const values = rounds.map((round) =>
    having.map((run) => inUnit(run.series[metric][run.round.indexOf(round)], unit)),
  );
  const over = (pick) => values.map((row) => (row.includes(null) ? null : pick(...row)));
  return { rounds, mean: values.map(mean), low: over(Math.min), high: over(Math.max), seeds: having.length };
}

// The area between low and high, interrupted where there is no value.
function band({ rounds, low, high }, method) {
  const x = [];
  const y = [];
  let start = 0;
  for (let end = 0; end <= rounds.length; end++) {
    if (end < rounds.length && low[end] !== null) continue;
    if (end > start) {
      const part = rounds.slice(start, end);
      x.push(...part, ...part.toReversed(), null);
      y.push(...low.slice(start, end), ...high.slice(start, end).toReversed(), null);
    }
    start = end + 1;
  }
  return {
    ...{ x, y, type: "scatter", mode: "lines", fill: "toself", hoverinfo: "skip", showlegend: false },
    line: { width: 0 },
    fillcolor: faded(colourOf(method), isDark() ? 0.2 : 0.14),
  };
}

function line(method, x, y, more = {}) {
  return {
    ...{ x, y, type: "scatter", name: plain(method), connectgaps: false },
    mode: x.length <= 30 ? "lines+markers" : "lines",
    line: { color: colourOf(method), width: 2.5, dash: dashOf(method) },
    marker: { size: 5 },
    ...more,
  };
}

const numberFormat = (unit) => (unit === "%" || unit === "MB" ? ".2f" : ".4~g");
const withUnit = (title, unit) => (unit ? `${title}, ${unit}` : title);
const spaced = (unit) => (unit ? ` ${unit}` : "");

function metricTraces(metric, eachSeed) {
  const { unit } = metricInfo(metric);
  const shape = `%{y:${numberFormat(unit)}}${spaced(unit)}`;
  const bands = [];
  const lines = [];
  for (const group of visibleGroups()) {
    const { method } = group;
    const found = byRound(runsOf(group.counted), metric);
    if (!found) continue;
    const thin = { width: 1, color: faded(colourOf(method), 0.65), dash: dashOf(method) };
    if (found.seeds > 1 && !eachSeed) bands.push(band(found, method));
    for (const index of group.runs) {
      const run = data.runs[index];
      const waiting = !group.counted.includes(index);
      if (!(eachSeed || waiting) || !(metric in run.series)) continue;
      const y = run.series[metric].map((value) => inUnit(value, unit));
      const name = plain(`${method}, seed ${run.seed}${run.complete ? "" : `, ${run.state}`}`);
      lines.push(
        line(method, run.round, y, {
          ...{ name, mode: "lines", showlegend: false, hovertemplate: shape },
          line: waiting ? { ...thin, dash: "dot" } : thin,
        }),
      );
    }
    const range = found.rounds.map((_, i) =>
      found.seeds > 1 && found.low[i] !== null
        ? ` (${found.low[i].toPrecision(4)} to ${found.high[i].toPrecision(4)})`
        : "",
    );
    lines.push(
      line(method, found.rounds, found.mean, { customdata: range, hovertemplate: `${shape}%{customdata}` }),
    );
  }
  return [...bands, ...lines];
}

const lastRound = (traces) => Math.max(...traces.flatMap(({ x }) => x.filter((value) => value !== null)));

// Of few rounds every one has its tick: Plotly would put some between them, and round their labels.
const rounds = (traces) =>
  axis("communication round", { tickformat: "d", ...(lastRound(traces) <= 8 ? { dtick: 1 } : {}) });

function drawCurves() {
  const { title, unit, what } = metricInfo();
  const most = Math.max(0, ...visibleGroups().map((group) => group.counted.length));
  byId("curves-title").textContent = `${title} over rounds`;
  const traces = metricTraces(choice.metric, byId("each-seed").checked);
  const over = most > 1 ? "Lines are means over seeds, bands reach from the lowest seed to the highest." : "";
  note("curves", [what, over].filter(Boolean).join(" "));
  if (!visibleGroups().length) return drawNothing("curves", "All methods are switched off: choose one above.");
  if (!traces.length) return drawNothing("curves", `None of these methods records this: ${title}.`);
  const labels = endLabels(traces.filter((trace) => trace.showlegend !== false));
  const longest = Math.max(0, ...labels.map((label) => label.length));
  const last = lastRound(traces);
  const first = 1 - 0.02 * last; // no round 0 on the axis, but room for the first marker
  const layout = {
    xaxis: { ...rounds(traces), autorangeoptions: { clipmin: first, ...(labels.length ? { clipmax: last } : {}) } },
    yaxis: axis(withUnit(title, unit), unit === "%" ? { autorangeoptions: { clipmin: 0, clipmax: 101 } } : {}),
    hovermode: "x unified",
    annotations: labels.map(({ annotation }) => annotation),
    margin: { ...baseLayout().margin, r: labels.length ? 16 + 7.4 * longest : 12 },
  };
  return draw("curves", traces, layout, choice.metric);
}

// Each line's name and value at its end, moved apart where they would overlap.
function endLabels(lines) {
  const { clientWidth, clientHeight } = byId("curves").querySelector(".plot");
  if (clientWidth < 640 || lines.length > 12) return [];
  const known = lines.flatMap(({ y }) => y.filter((value) => value !== null));
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const pixels = (clientHeight - 110) / (high - low || 1);
  const ends = lines
    .map((trace) => ({ trace, end: trace.y.findLastIndex((value) => value !== null) }))
    .filter(({ end }) => end >= 0)
    .sort((a, b) => a.trace.y[a.end] - b.trace.y[b.end]);
  const wanted = ends.map(({ trace, end }) => (trace.y[end] - low) * pixels);
  const at = movedApart(wanted, 17, 10);
  return ends.map(({ trace, end }, i) => {
    const value = trace.y[end];
    const text = `${trace.name}  ${Math.abs(value) < 10 ? value.toPrecision(3) : value.toFixed(1)}`;
    const annotation = {
      ...{ x: trace.x[end], y: value, text, showarrow: false, xanchor: "left", align: "left" },
      ...{ xshift: 8, yshift: at[i] - wanted[i] },
      font: { color: trace.line.color, size: 12.5, weight: 600 },
    };
    return { annotation, length: text.length };
  });
}

// Rising places, each at least `gap` from the next, as near as can be to where they were; the
// highest rises by `most` at most.
function movedApart(places, gap, most) {
  const moved = [...places];
  for (let step = 0; step < 100; step++) {
    for (let i = 1; i < moved.length; i++) {
      const missing = gap - (moved[i] - moved[i - 1]);
      if (missing <= 0) continue;
      moved[i - 1] -= missing / 2;
      moved[i] += missing / 2;
    }
  }
  let ceiling = places.at(-1) + most;
  for (let i = moved.length - 1; i >= 0; i--) {
    moved[i] = Math.min(moved[i], ceiling);
    ceiling = moved[i] - gap;
  }
  return moved;
}

function drawDrift() {
  const name = "prototype_drift";
  const traces = metricTraces(name, false);
  if (!traces.length) return void (byId("drift").hidden = true);
  note("drift", metricInfo(name).what);
  const layout = { xaxis: rounds(traces), yaxis: axis("relative change"), hovermode: "x unified" };
  return draw("drift", traces, layout);
}

// Accuracy against all that was spent until then.
function drawCost() {
  const bytes = byId("cost-axis").value === "bytes";
  const parts = bytes ? ["bytes_up", "bytes_down"] : ["timing.seconds"];
  const unit = bytes ? "MB" : "s";
  const traces = [];
  for (const group of visibleGroups()) {
    const runs = runsOf(group.counted);
    const accuracy = byRound(runs, "accuracy");
    const costs = parts.map((part) => byRound(runs, part)).filter(Boolean);
    if (!accuracy || costs.length < parts.length) continue;
    let spent = 0;
    const x = accuracy.rounds.map((_, i) => (spent += sum(costs.map((cost) => cost.mean[i]))));
    traces.push(
      line(group.method, x, accuracy.mean, {
        customdata: accuracy.rounds,
        hovertemplate: `%{y:.2f} % after %{x:.4~s} ${unit}, round %{customdata}`,
      }),
    );
  }
  if (!traces.length) return void (byId("cost").hidden = true);
  note(
    "cost",
    bytes
      ? "All that server and clients sent each other until then. Up and to the left is better."
      : "Seconds of computing until then: compare runs of one machine only.",
  );
  const layout = {
    xaxis: axis(bytes ? "traffic so far, MB" : "time so far, s", { rangemode: "tozero" }),
    yaxis: axis("test accuracy, %"),
  };
  return draw("cost", traces, layout, unit);
}

const classNames = (run) => data.partitions[run.partition]?.classes ?? null;

function drawClasses() {
  const select = byId("classes-of");
  const having = visibleGroups().filter((g) => runsOf(g.counted).some((run) => run.per_class));
  if (!having.length) return void (byId("classes").hidden = true);
  fillSelect(select, [
    { value: "", text: "all, last round" },
    ...having.map((g) => ({ value: g.method, text: `${g.method}, by round` })),
  ]);
  const runs = (group) => runsOf(group.counted).filter((run) => run.per_class);
  const numClasses = runs(having[0])[0].per_class.values[0].length;
  const classes =
    classNames(runs(having[0])[0])?.slice(0, numClasses) ?? [...Array(numClasses).keys()].map(String);
  const meanOf = (group, pick) => {
    const rows = runs(group).map(pick);
    return classes.map((_, j) => inUnit(mean(rows.map((row) => row?.[j] ?? null)), "%"));
  };
  const one = having.find((group) => group.method === select.value);
  const common = { zmin: 0, zmax: 100, colorbar: { ticksuffix: " %" } };
  if (!one) {
    const methods = having.map((group) => group.method);
    const z = having.map((group) => meanOf(group, (run) => run.per_class.values.at(-1)));
    const hover = z.map((_, i) => classes.map((name) => plain(`${methods[i]}, class ${name}`)));
    note("classes", "Mean over seeds, after the last round.");
    const trace = heatmap("classes", "%{z:.0f}", {
      ...{ z, ...common, text: hover, hovertemplate: "%{text}: %{z:.1f} %<extra></extra>" },
    });
    const layout = {
      xaxis: axis("class", { ...names(classes), showgrid: false }),
      yaxis: axis("", { ...names(methods), showgrid: false, autorange: "reversed" }),
    };
    return draw("classes", [trace], layout, "all");
  }
  const shownRounds = shared(runs(one).map((run) => run.per_class.round));
  const columns = shownRounds.map((round) =>
    meanOf(one, (run) => run.per_class.values[run.per_class.round.indexOf(round)]),
  );
  const z = classes.map((_, j) => columns.map((column) => column[j]));
  const hover = classes.map((name) => shownRounds.map(() => plain(name)));
  note("classes", `Mean over the seeds of ${one.method}.`);
  const trace = heatmap("classes", "%{z:.0f}", {
    ...{ x: shownRounds, z, ...common, text: hover },
    hovertemplate: "class %{text}, round %{x}: %{z:.1f} %<extra></extra>",
  });
  const layout = {
    xaxis: axis("communication round", { showgrid: false }),
    yaxis: axis("class", { ...names(classes), showgrid: false, autorange: "reversed" }),
  };
  return draw("classes", [trace], layout, one.method);
}

function drawPartition() {
  const having = groups().flatMap((g) => runsOf(g.runs)).filter((run) => run.partition in data.partitions);
  const bySeed = new Map(having.map((run) => [String(run.seed), run.partition]));
  const seeds = [...bySeed.keys()].sort((a, b) => a - b);
  if (!seeds.length) return void (byId("partition").hidden = true);
  const select = byId("partition-of");
  fillSelect(select, seeds.map((seed) => ({ value: seed, text: seed })));
  const { classes, class_counts: counts } = data.partitions[bySeed.get(select.value)];
  const z = classes.map((_, j) => counts.map((row) => row[j] || null)); // none is blank
  const hover = classes.map((name) => counts.map((_, k) => plain(`client ${k}, class ${name}`)));
  const trace = heatmap("partition", "%{z}", {
    ...{ z, zmin: 0, text: hover, hovertemplate: "%{text}: %{z:,} images<extra></extra>" },
  });
  const layout = {
    xaxis: axis("client", { showgrid: false, ...(counts.length <= 30 ? { dtick: 1 } : {}) }),
    yaxis: axis("class", { ...names(classes), showgrid: false, autorange: "reversed" }),
  };
  const sizes = counts.map(sum);
  const [least, most] = [Math.min(...sizes), Math.max(...sizes)].map((n) => n.toLocaleString("en"));
  note("partition", `Training images; a client has ${least} to ${most}. Blank: none of this class.`);
  return draw("partition", [trace], layout, select.value);
}

// Last accuracy against an option that takes several values: Fig. 5 and 6 of the paper, live.
function drawOptions() {
  const finished = data.runs.filter((run) => run.dataset === choice.dataset && run.complete);
  const numeric = (run) => Object.keys(run.options).filter((name) => typeof run.options[name] === "number");
  const all = unique(finished.flatMap(numeric));
  const linesFor = (option) => {
    const lines = new Map();
    for (const run of finished) {
      if (typeof run.options[option] !== "number") continue;
      const others = Object.entries(run.options).filter(([name]) => name !== option);
      const text = others.map(([name, value]) => `${name} ${value}`).join(", ");
      const key = [run.name, text].filter(Boolean).join(", ");
      if (!lines.has(key)) lines.set(key, []);
      lines.get(key).push(run);
    }
    return [...lines].filter(([, runs]) => unique(runs.map((run) => run.options[option])).length > 1);
  };
  const offered = all.filter((option) => linesFor(option).length);
  if (!offered.length) return void (byId("options").hidden = true);
  const select = byId("option");
  fillSelect(select, offered.map((option) => ({ value: option, text: option.replaceAll("_", " ") })));
  const option = select.value;
  const colours = palette();
  const traces = linesFor(option).map(([name, runs], index) => {
    const x = unique(runs.map((run) => run.options[option])).sort((a, b) => a - b);
    const at = x.map((value) =>
      runs
        .filter((run) => run.options[option] === value)
        .map((run) => run.series.accuracy.at(-1))
        .filter((accuracy) => accuracy !== null)
        .map((accuracy) => 100 * accuracy),
    );
    const y = at.map((values) => (values.length ? mean(values) : null));
    const spread = at.map((values, i) =>
      values.length > 1 ? Math.sqrt(sum(values.map((v) => (v - y[i]) ** 2)) / (values.length - 1)) : 0,
    );
    return {
      ...{ x, y, type: "scatter", mode: "lines+markers", name: plain(name), marker: { size: 7 } },
      line: { color: colours[index % colours.length], width: 2 },
      error_y: { type: "data", array: spread, visible: spread.some(Boolean), thickness: 1.2, width: 3 },
      hovertemplate: "%{y:.2f} % at %{x}",
    };
  });
  note("options", "Accuracy after the last round, in all settings of this data set; a line joins finished runs that differ in this option only. Bars: standard deviation over seeds.");
  const values = unique(traces.flatMap((trace) => trace.x));
  const wide = Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > 20;
  const layout = {
    xaxis: axis(option.replaceAll("_", " "), { type: wide ? "log" : "linear", ...(values.length <= 8 ? { tickvals: values } : {}) }),
    yaxis: axis("test accuracy, %"),
    showlegend: true,
    legend: { orientation: "h", y: 1.15 },
  };
  return draw("options", traces, layout, option);
}

// The run chosen in a panel's select, among those in view that have this extra.
function chosenRun(extra) {
  const having = visibleRuns().filter((run) => run[extra]);
  byId(extra).hidden = !having.length;
  const select = byId(`${extra}-of`);
  fillSelect(select, having.map((run) => ({ value: run.path, text: `${run.method}, seed ${run.seed}` })));
  return having.find((run) => run.path === select.value);
}

function drawLandscape() {
  const run = chosenRun("landscape");
  if (!run) return undefined;
  const { models = [], around } = run.landscape;
  const select = byId("landscape-where");
  fillSelect(select, [
    { value: "", text: "in one plane" },
    ...(around?.models ?? []).map(({ name }) => ({ value: name, text: `around ${name}` })),
  ]);
  const one = around?.models.find(({ name }) => name === select.value);
  const grid = one ? around.grid : run.landscape.grid;
  const loss = one ? one.loss : run.landscape.loss;
  const shown = one ? [{ ...models.find(({ name }) => name === one.name), name: one.name, at: [0, 0] }] : models;
  const values = loss.flat().filter((value) => value !== null);
  const logarithmic = Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > 20;
  const z = loss.map((row) => row.map((value) => (value !== null && logarithmic ? Math.log10(value) : value)));
  const title = { text: logarithmic ? "log10 of the loss" : "loss", side: "right", font: { size: 12 } };
  const contours = {
    ...{ x: grid, y: grid, z, type: "contour", customdata: loss, ncontours: 24, colorscale: shades() },
    line: { width: 0.7, color: faded(palette()[6], 0.3) },
    colorbar: { thickness: 10, outlinewidth: 0, title },
    hovertemplate: "loss %{customdata:.4~g}<extra></extra>",
  };
  const points = {
    x: shown.map((model) => model.at[0]),
    y: shown.map((model) => model.at[1]),
    text: shown.map((model) => plain(model.name)),
    ...{ type: "scatter", mode: shown.length > 8 ? "markers" : "markers+text", textposition: "top center" },
    marker: {
      size: shown.map((model) => (model.name === "global" ? 12 : 9)),
      symbol: shown.map((model) => (model.name === "global" ? "star" : "circle")),
      color: palette()[1],
      line: { width: 1, color: cssColour("--panel") },
    },
    customdata: shown.map((model) => model.loss ?? null),
    hovertemplate: "%{text}: loss %{customdata:.4~g}<extra></extra>",
  };
  note(
    "landscape",
    one
      ? "Loss on test images around this model, along two random directions, filter by filter as long as its weights."
      : "Loss on test images; points are the models of one round, seen from the new global one (star). Directions are random mixtures of the clients' steps.",
  );
  const bare = { showgrid: false };
  const layout = { xaxis: axis("direction 1", bare), yaxis: axis("direction 2", bare) };
  return draw("landscape", [contours, points], layout, `${run.path} ${select.value}`);
}

// More colours than the palette has: around the circle.
function categoryColours(count) {
  if (count <= palette().length) return palette();
  return [...Array(count).keys()].map((i) => `hsl(${(360 * i) / count} ${i % 2 ? 75 : 55}% ${isDark() ? 65 : 45}%)`);
}

function drawEmbedding() {
  const run = chosenRun("embedding");
  if (!run) return undefined;
  const { x, y, label, classes, client, predicted } = run.embedding;
  const by = byId("embedding-by");
  const className = (j) => classes?.[j] ?? j;
  const right = predicted?.map((guess, i) => (guess === label[i] ? "right" : "wrong"));
  const choices = { label, client, right };
  for (const option of by.options) option.disabled = !choices[option.value];
  if (!choices[by.value]) by.value = "label";
  const category = choices[by.value];
  const kinds = unique(category).sort((a, b) => (a < b ? -1 : 1));
  const colours = by.value === "right" ? [cssColour("--good"), cssColour("--bad")] : categoryColours(kinds.length);
  const nameOf = { label: (j) => `${className(j)}`, client: (k) => `client ${k}`, right: (word) => word }[by.value];
  const traces = kinds.map((kind, index) => {
    const members = [...category.keys()].filter((i) => category[i] === kind);
    const about = (i) =>
      [
        `class ${className(label[i])}`,
        client && client[i] !== null ? `client ${client[i]}` : null,
        predicted ? `taken for ${className(predicted[i])}` : null,
      ].filter(Boolean).join(", ");
    return {
      ...{ type: "scatter", mode: "markers", name: plain(nameOf(kind)) },
      x: members.map((i) => x[i]),
      y: members.map((i) => y[i]),
      text: members.map((i) => plain(about(i))),
      hovertemplate: "%{text}<extra></extra>",
      marker: { size: 5, opacity: 0.8, color: colours[index % colours.length] },
    };
  });
  note("embedding", "Each point is an image; a click in the legend hides or shows its points.");
  const bare = { showticklabels: false, showgrid: false };
  const layout = {
    xaxis: axis("", bare),
    yaxis: axis("", { ...bare, scaleanchor: "x" }),
    showlegend: kinds.length <= 30,
    legend: { itemsizing: "constant" },
  };
  return draw("embedding", traces, layout, `${run.path} ${by.value}`);
}

const shown = (value) => (typeof value === "number" ? String(+value.toPrecision(4)) : (value ?? "–"));

function drawTheory() {
  const run = chosenRun("theory");
  if (!run) return undefined;
  const { bound, observed, conditions = [], notes = [], constants } = run.theory;
  const series = [["observed", observed, "solid"], ["bound", bound, "dash"]];
  const traces = series.map(([name, y, dash], index) => ({
    ...{ type: "scatter", mode: "lines+markers", name, y, x: y.map((_, i) => i + 1) },
    line: { color: palette()[index], width: 2.5, dash },
    marker: { size: 5 },
    hovertemplate: "%{y:.4~g}",
  }));
  const values = [...bound, ...observed].filter((value) => value !== null);
  const logarithmic = Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > 50;
  byId("conditions").replaceChildren(
    element("thead", {}, element("tr", {}, ...["Condition", "needs", "has", "holds"].map((text) =>
      element("th", { scope: "col" }, element("span", { text }))))),
    element("tbody", {}, ...conditions.map(({ name, needs, has, holds }) =>
      element("tr", {},
        element("th", { scope: "row", text: name }),
        ...[needs, has].map((value) => element("td", { text: shown(value) })),
        element("td", holds ? { class: "holds", text: "✓ yes" } : { class: "fails", text: "✗ no" })))),
  );
  byId("conditions").hidden = !conditions.length;
  const figures = Object.entries(constants ?? {}).map(([name, value]) => `${name} = ${shown(value)}`);
  const lines = figures.length ? [`Estimated: ${figures.join(", ")}.`, ...notes] : notes;
  byId("theory-notes").replaceChildren(...lines.map((text) => element("li", { text })));
  const layout = {
    xaxis: rounds(traces),
    yaxis: axis("loss", logarithmic ? { type: "log", dtick: 1, exponentformat: "power" } : {}),
    showlegend: true,
    legend: { orientation: "h", y: 1.12 },
    hovermode: "x unified",
  };
  return draw("theory", traces, layout, run.path);
}

const PANELS = [
  drawCurves, drawCost, drawClasses, drawPartition, drawDrift,
  drawOptions, drawLandscape, drawEmbedding, drawTheory,
];
