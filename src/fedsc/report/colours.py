"""The colours of methods, the same in pictures and on the page."""

# Okabe and Ito: distinct for colour-blind readers, and in print. Their yellow cannot be seen on
# white; a wine red stands in its place. The tenth, indigo, is of Paul Tol.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#999999",
    "#882255",
    "#332288",
)
# The same hues, lighter where they would drown in a dark background.
COLOURS_ON_DARK = (
    "#4A9EE0",
    "#F07C3C",
    "#2BC39A",
    "#DE95BD",
    "#F0B429",
    "#9AD8FF",
    "#F2F2F2",
    "#A3A3A3",
    "#F0E442",
    "#B39DFF",
)
