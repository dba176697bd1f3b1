// Run in the page of a report: what text of it cannot be read, as a list. That is text beyond the
// window's edges or on another label, small text, and text with less contrast than WCAG's level AA.
() => {
  const rgba = (text) => (text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const luminance = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const part = colour[i] / 255;
    return sum + weight * (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  }, 0);
  const behind = (node) => {
    const colour = rgba(getComputedStyle(node).backgroundColor);
    return colour.length < 4 || colour[3] > 0 ? colour : behind(node.parentElement);
  };
  const found = [];
  for (const node of document.querySelectorAll("main *")) {
    const texts = [...node.childNodes].filter((child) => child.nodeType === Node.TEXT_NODE);
    const text = texts.map((child) => child.textContent).join("").trim();
    const box = node.getBoundingClientRect(), style = getComputedStyle(node);
    if (!text || !box.width) continue;
    const colour = rgba(node instanceof SVGElement ? style.fill : style.color);
    const [low, high] = [luminance(colour), luminance(behind(node))].sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    if (!node.closest(".scroll") && (box.left < 0 || box.right > innerWidth)) found.push(text + ": cut off");
    if (parseFloat(style.fontSize) < 10.5) found.push(text + ": " + style.fontSize);
    if (contrast < 4.5) found.push(text + ": contrast " + contrast.toFixed(2));
  }
  const labels = [...document.querySelectorAll("#areas .annotation")];
  const boxes = labels.map((label) => [label.textContent, label.getBoundingClientRect()]);
  boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
    const beside = a.right <= b.left + 1 || b.right <= a.left + 1;
    if (!beside && a.bottom > b.top + 1 && b.bottom > a.top + 1) found.push(one + " on " + other);
  }));
  return found;
}
