// Steps through the pictures that docs/play.py has drawn: shows the parts of a step, and says what happens.
for (const play of document.querySelectorAll("figure.play")) {
    const says = JSON.parse(play.dataset.says), last = says.length - 1
    const parts = [...play.querySelectorAll("[data-from]")].map(part => [part, +part.dataset.from, +part.dataset.to])
    const caption = play.querySelector("figcaption")
    const bar = document.createElement("div")
    const slider = Object.assign(document.createElement("input"), {type: "range", min: 0, max: last, value: 0})
    slider.setAttribute("aria-label", "step")
    let timer = 0

    const show = step => {
        slider.value = step
        slider.setAttribute("aria-valuetext", says[step])
        for (const [part, from, to] of parts) part.classList.toggle("off", step < from || step >= to)
        caption.textContent = `${step} of ${last}. ${says[step]}`
    }
    const stop = () => {
        clearInterval(timer)
        timer = 0
        run.textContent = "Play"
    }
    const move = by => {
        stop()
        show(Math.min(last, Math.max(0, +slider.value + by)))
    }
    const start = () => {
        if (+slider.value === last) show(0)
        run.textContent = "Pause"
        timer = setInterval(() => +slider.value < last ? show(+slider.value + 1) : stop(), 1200)
    }
    const button = (text, label, act) => {
        const made = Object.assign(document.createElement("button"), {type: "button", textContent: text, onclick: act})
        if (label) made.setAttribute("aria-label", label)
        return made
    }
    const run = button("Play", "", () => timer ? stop() : start())
    slider.oninput = () => move(0)
    bar.append(run, button("‹", "one step back", () => move(-1)), button("›", "one step on", () => move(1)), slider)
    caption.before(bar)
    show(0)
}
