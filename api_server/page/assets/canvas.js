// Sets up canvases in the screen's resolution and the style sheet's colours.

/** Resizes a canvas to this number of CSS pixels, clears it, and returns its drawing context. */
export function penOf(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return pen;
}

/** A colour of the style sheet, as it is now. */
export const colour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

let groups = new Map();

/** Colours requests by group from now on: owner → number of its group; others by themselves. */
export function colourByGroup(numbers) {
  groups = numbers;
}

/** The colour of a request: neighbours differ, and none is that of pinned blocks (yellow). */
export function colourOf(request) {
  const owner = groups.get(request) ?? request;
  const turn = (owner * 0.61803398875) % 1;
  const hue = (125 + turn * 285) % 360; // leaves out 50 to 125 degrees
  const light = document.documentElement.dataset.theme === "dark" ? 0.72 : 0.6;
  return `oklch(${light + (owner % 2 ? 0.05 : -0.03)} 0.15 ${hue.toFixed(1)})`;
}
