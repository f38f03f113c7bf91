// Builds DOM nodes. Text is always set as text: no string ever becomes HTML, and the page's security policy forbids it.

const SVG = "http://www.w3.org/2000/svg";

function append(node, children) {
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

/** Return an element. Attributes named `on…` are listeners, `data` holds data attributes, `true` and `false` are boolean. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  return append(node, children);
}

/** Return an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return append(node, children);
}

/** Return one of the icons of index.html. */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true", viewBox: "0 0 24 24" }, svg("use", { href: `#icon-${name}` }));
}

/** Return a button with an icon; its label is its tooltip, too. */
export function iconButton(name, label, onclick, attributes = {}) {
  return el("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...attributes }, icon(name));
}

export const byId = (id) => document.getElementById(id);

/** Set the text of a node, unless it has it: an unchanged live region stays silent. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Say something to screen readers. */
export function announce(text) {
  setText(byId("announcer"), text);
}

/** Copy text, and say so on the button. */
export async function copyText(text, button) {
  let label = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    label = "Copying is not allowed here";
  }
  const before = button.getAttribute("aria-label");
  button.classList.add("is-done");
  button.setAttribute("aria-label", label);
  announce(label);
  setTimeout(() => {
    button.classList.remove("is-done");
    button.setAttribute("aria-label", before);
  }, 1500);
}
