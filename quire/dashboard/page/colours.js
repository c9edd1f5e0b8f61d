// A colour for each request that stays with it: neighbours in time are a golden angle apart, and those that are eight or
// thirteen apart, whose hues are close again, differ in lightness.

const GOLDEN_ANGLE = 137.508;

function colourOf(id) {
  const number = Number(id.slice(id.lastIndexOf("#") + 1)) || 1;
  const hue = (195 + (number - 1) * GOLDEN_ANGLE) % 360;
  const tone = [0.03, -0.07, -0.16][Math.floor((number - 1) / 8) % 3];
  return { hue, tone, lit: `oklch(${(0.78 + tone).toFixed(2)} 0.12 ${hue.toFixed(1)})` };
}

function paint(target, { hue, tone }) {
  target.style.setProperty("--hue", hue.toFixed(1));
  target.style.setProperty("--tone", tone);
}

// In the well, which is dark in both themes; `lit` is for what is owned.
const unfilled = (hue) => `oklch(0.4 0.06 ${hue.toFixed(1)})`;
const faded = (hue) => `oklch(0.42 0.045 ${hue.toFixed(1)})`;

const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
