// Plotly in the dress of this page.

// Plotly reads some tags in texts; names of methods and classes are to be shown as they are.
const plain = (text) =>
  String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

const cssColour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const faded = (hex, opacity) =>
  `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${opacity})`;

function axis(title, more = {}) {
  return {
    title: { text: title, standoff: 10, font: { size: 13, color: cssColour("--quiet") } },
    tickfont: { size: 12 },
    gridcolor: cssColour("--line"),
    linecolor: cssColour("--line"),
    zeroline: false,
    automargin: true,
    fixedrange: false,
    ...more,
  };
}

function baseLayout() {
  const font = { family: getComputedStyle(document.documentElement).fontFamily, size: 13 };
  return {
    font: { ...font, color: cssColour("--ink") },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 8, r: 12, t: 12, b: 8 },
    showlegend: false,
    hoverlabel: {
      bgcolor: cssColour("--panel"),
      bordercolor: cssColour("--line"),
      font: { ...font, color: cssColour("--ink") },
      namelength: -1,
    },
    modebar: {
      bgcolor: "rgba(0,0,0,0)",
      color: cssColour("--quiet"),
      activecolor: cssColour("--ink"),
    },
  };
}

// A downloaded picture stands alone: with a background, a title and a legend.
function download(plot, format) {
  const { data: traces, layout } = plot;
  const title = `${choice.dataset}, ${choice.setting}`;
  const [width, height] = [Math.max(plot.clientWidth, 640), plot.clientHeight + 60];
  const figure = {
    data: traces,
    layout: {
      ...layout,
      width,
      height,
      paper_bgcolor: cssColour("--panel"),
      title: { text: plain(title), font: { size: 15 }, x: 0.02, xanchor: "left" },
      margin: { ...layout.margin, t: 52 },
      showlegend: traces.filter((trace) => trace.showlegend !== false && trace.name).length > 1,
    },
  };
  const filename = `${plot.closest(".panel").id}-${title}`.replace(/[^\w.-]+/g, "_");
  return Plotly.downloadImage(figure, { format, filename, width, height, scale: 2 });
}

// One object for good: Plotly starts a figure anew, without its zoom, when it gets another.
const CONFIG = {
  responsive: true,
  displaylogo: false,
  modeBarButtonsToRemove: ["toImage", "select2d", "lasso2d", "autoScale2d"],
  modeBarButtonsToAdd: [
    { name: "png", title: "Download PNG", icon: Plotly.Icons.camera, click: (plot) => download(plot, "png") },
    { name: "svg", title: "Download SVG", icon: Plotly.Icons.disk, click: (plot) => download(plot, "svg") },
  ],
};

// Draw into a panel. Zoom stays as long as `view` does: what is shown, not which runs have come in.
function draw(id, traces, layout, view = "") {
  const plot = byId(id).querySelector(".plot");
  byId(id).hidden = false;
  if (plot.classList.contains("empty")) {
    plot.classList.remove("empty");
    plot.textContent = "";
  }
  const key = [choice.dataset, choice.setting, view].join("|");
  return Plotly.react(plot, traces, { ...baseLayout(), uirevision: key, ...layout }, CONFIG);
}

function drawNothing(id, text) {
  const plot = byId(id).querySelector(".plot");
  byId(id).hidden = false;
  if (!plot.classList.contains("empty")) Plotly.purge(plot);
  plot.classList.add("empty");
  plot.textContent = text;
}

const note = (id, text) => {
  byId(id).querySelector(".note").textContent = text;
};

function shades() {
  return isDark()
    ? [[0, "#1b2530"], [0.4, "#275a88"], [0.7, "#4f9bd8"], [1, "#b5e0ff"]]
    : [[0, "#f1f6fb"], [0.4, "#bdd7ec"], [0.7, "#5b9fd0"], [1, "#0b3f73"]];
}

// A heat map, with gaps between cells and numbers in them where there is room.
function heatmap(id, format, trace) {
  const { clientWidth, clientHeight } = byId(id).querySelector(".plot");
  const width = (clientWidth - 170) / trace.z[0].length;
  const height = (clientHeight - 60) / trace.z.length;
  return {
    type: "heatmap",
    colorscale: shades(),
    xgap: width > 10 ? 2 : 0,
    ygap: height > 10 ? 2 : 0,
    hoverongaps: false,
    ...(width > 30 && height > 15 ? { texttemplate: format, textfont: { size: 11 } } : {}),
    ...trace,
    colorbar: { thickness: 10, outlinewidth: 0, ticklen: 0, ...trace.colorbar },
  };
}

// Categories on an axis, by name where they can be read, else by number.
function names(values, most = 30) {
  if (values.length > most) return { showticklabels: false };
  const short = values.map((value) => (String(value).length > 18 ? `${String(value).slice(0, 17)}…` : value));
  return { tickmode: "array", tickvals: values.map((_, i) => i), ticktext: short.map(plain) };
}
