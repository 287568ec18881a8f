// What a person sees of a page: text that contrasts too little with its ground, by element and class.
() => {
  const rgba = text => {
    const [r, g, b, a = 1] = (text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number)
    return text.startsWith('color(') ? [r * 255, g * 255, b * 255, a] : [r, g, b, a]
  }
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3])).concat(1)
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4
  const light = c => [0.2126, 0.7152, 0.0722].reduce((sum, share, i) => sum + share * linear(c[i] / 255), 0)
  const ancestors = e => e ? [...ancestors(e.parentElement), e] : []
  const poor = {}
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const e = node.parentElement, box = e.getBoundingClientRect()
    if (!node.data.trim() || box.width < 2 || box.height < 2 || e.closest('script, style, noscript, svg')) continue
    if (!e.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue
    const around = ancestors(e).map(each => getComputedStyle(each)), style = around.at(-1)
    const ground = around.reduce((below, each) => over(rgba(each.backgroundColor), below), [255, 255, 255, 1])
    const colour = rgba(style.color)
    colour[3] *= around.reduce((product, each) => product * Number(each.opacity), 1)
    const [high, low] = [light(over(colour, ground)), light(ground)].sort((x, y) => y - x)
    const ratio = (high + 0.05) / (low + 0.05), size = parseFloat(style.fontSize)
    const large = size >= 24 || (size >= 18.6 && Number(style.fontWeight) >= 700)
    if (ratio < (large ? 3 : 4.5)) poor[`${e.tagName}.${e.className}`] = `${ratio.toFixed(2)}: ${node.data.trim().slice(0, 30)}`
  }
  return poor
}
