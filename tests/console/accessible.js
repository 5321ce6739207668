() => {
  // What of the page that is shown is hard to read or has no name; test_console_pages.py runs it there.
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

  const rgba = (paint) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = paint;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };

  // WCAG 2's relative luminance.
  const light = (paint) => {
    const [r, g, b] = paint.slice(0, 3).map((value) => {
      const part = value / 255;
      return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };

  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const paint = rgba(getComputedStyle(each).backgroundColor);
      if (paint[3] === 255) return paint;
    }
    return [255, 255, 255, 255];
  };

  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const words = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
    if (!words.length || !element.checkVisibility() || element.matches(":disabled, option")) continue;
    const style = getComputedStyle(element);
    const ink = light(rgba(element instanceof SVGElement ? style.fill : style.color));
    const ground = light(behind(element));
    const ratio = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    if (ratio < 4.5) found.push(`contrast ${ratio.toFixed(2)}: ${words[0].textContent.trim().slice(0, 40)}`);
  }
  for (const element of document.querySelectorAll("button, a, input, select, textarea, [role=img]")) {
    const name = element.textContent.trim() || element.getAttribute("aria-label") || element.labels?.length;
    if (element.checkVisibility() && !name) found.push(`no name: ${element.outerHTML.slice(0, 120)}`);
  }
  if (document.documentElement.scrollWidth > innerWidth) found.push("wider than the window");
  return found;
}
