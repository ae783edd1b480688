// Plays the explorers' states, which docs/packs.py has drawn: fetches a pack when its explorer comes near the screen.
"use strict";
{
    const packs = new URL("packs/", document.currentScript.src);

    const fetched = async name => {
        const answer = await fetch(new URL(`${name}.pack`, packs));
        if (!answer.ok) throw new Error(`${answer.url}: ${answer.status}`);
        return new Response(answer.body.pipeThrough(new DecompressionStream("gzip"))).json();
    };

    const play = ({lines, states}, box, cell) => {
        const form = box.querySelector("fieldset"), controls = [...form.querySelectorAll("select, input")];
        const picture = document.createElement("div"), [back, sentence] = box.querySelectorAll("[role=status]"), tiles = cell.querySelector(".tiles");
        const first = controls.map(control => control.dataset.first), changes = new Map(); // a control's place -> its value
        let start = first;
        const texts = control => control.options ? [...control.options].map(each => each.text) : JSON.parse(control.dataset.texts);

        const show = () => {
            const values = () => start.map((value, k) => changes.get(k) ?? value), gone = [];
            while (!states[values()]) { // the page doesn't have all that differ from the start at once
                const [oldest] = changes.keys();
                changes.delete(oldest);
                gone.push(`${controls[oldest].dataset.label} is back at ${texts(controls[oldest])[start[oldest]]}`);
            }
            const [line, status, idle, numbers, ...svg] = states[values()].map(k => lines[k]);
            controls.forEach((control, k) => {
                control.value = values()[k];
                control.disabled = idle.split(" ").includes(control.name);
                if (control.type !== "range") return;
                control.ariaValueText = control.parentElement.querySelector("output").value = texts(control)[values()[k]];
            });
            sentence.innerHTML = line;
            back.textContent = gone.join(", ");
            for (const each of [picture, tiles]) each.classList.toggle("faded", numbers === undefined);
            if (numbers !== undefined) [tiles.innerHTML, picture.innerHTML] = [numbers, svg.join("\n")];
            picture.setAttribute("aria-label", status);
            for (const each of [sentence, tiles]) each.style.minHeight = `${each.offsetHeight}px`; // what is below stays there
        };

        form.addEventListener("input", ({target}) => {
            const k = controls.indexOf(target);
            changes.delete(k);
            if (target.value !== start[k]) changes.set(k, target.value);
            show();
        });
        for (const button of box.querySelectorAll("button"))
            button.addEventListener("click", () => {
                start = JSON.parse(button.dataset.start).map(String);
                changes.clear();
                show();
            });
        picture.className = "picture";
        picture.setAttribute("role", "img");
        cell.querySelector("a:has(> img)").replaceWith(picture);
        form.disabled = false;
        show();
    };

    for (const box of document.querySelectorAll(".explorer")) {
        const cell = box.closest(".cell_output");
        const near = new IntersectionObserver(([seen]) => {
            if (!seen.isIntersecting) return;
            near.disconnect();
            fetched(box.dataset.pack).then(pack => play(pack, box, cell), () => cell.classList.add("stored"));
        }, {rootMargin: "800px"});
        near.observe(cell);
    }
}
