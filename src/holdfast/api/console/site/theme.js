// Before the first paint, so that a dark page does not flash white. Not a module for that reason.
document.documentElement.dataset.theme = localStorage.getItem("theme") || "system";
