"""Section *network*: the speedup of workers over networks of several rates, from a model that this run feeds."""

from benchmarks.harness.section import Plan, Section
from benchmarks.network import costs, figures
from benchmarks.network.check import check
from benchmarks.network.grid import COMPUTE, RATES, Spot, curves, speedups
from benchmarks.workload.layouts import resnet18

KEY, TITLE = "network", "Speedup over a network"


def run(plan: Plan) -> Section:
    """Measure costs, let the model run, check it."""
    section = Section(KEY, TITLE)
    plan.say("costs of ResNet-18")
    measured = costs.measure(resnet18(), plan.density, plan.seed, quick=plan.quick)
    chosen = curves(quick=plan.quick)
    workers = (1, 4, 16) if plan.quick else (1, 2, 4, 8, 16)
    delays = (0.0,) if plan.quick else (0.0, 0.010, 0.050)
    spots = [
        Spot(curve, rate, delay, count, full)
        for full in (True, False)
        for rate in RATES
        for curve in chosen
        for delay in delays
        for count in workers
        if delay == 0 or count == workers[-1]
    ]
    plan.say(f"model: {len(spots)} points")
    found = speedups(measured, spots, draws=1 if plan.quick else 3)
    section.tables.append(figures.costs_table(measured, chosen))
    for rate in RATES:
        section.tables.append(figures.speedup_table(found, rate, chosen, workers))
        for full in (True, False):
            section.plots.append(figures.speedup_plot(found, rate, chosen, workers, full=full))
    if len(delays) > 1:
        section.tables.append(figures.delay_table(found, RATES, delays, chosen, workers[-1]))
    hiding, section.figures["hidden"] = figures.hiding_table(measured, chosen, workers)
    section.tables.append(hiding)
    section.figures["speedup"] = [
        {
            "curve": spot.curve.name,
            "bits_per_second": spot.rate,
            "delay_seconds": spot.delay,
            "workers": spot.workers,
            "cpu_costs": spot.full,
            "speedup": value,
        }
        for spot, value in found.items()
    ]
    section.figures["call_seconds"], section.figures["grpc_seconds_a_byte"] = measured.call, measured.byte
    section.notes += [
        f"ResNet-18 ({measured.layout.size:,} parameters), {COMPUTE * 1e3:.0f} ms of compute a step whatever the "
        f"number of workers, pushes of {plan.density:.0%}; the base is one machine that communicates with nobody. "
        "Curves are the model's unless they are said to be published or real.",
        "The model: every host has one card of the rate, and transfers under way share the server's card equally; "
        "pushes in groups, each encoded while the one before travels; decoding and top-k replies on the server's cores "
        f"({measured.costs(chosen[0]).server_cores}), applying on its one apply thread; an answer to "
        "the push and a question for the pull between them, so four delays a step. With overlap groups leave during "
        "the backward pass, and a pull runs beside the next step: one step more of staleness. TCP's slow start and "
        "losses are not in it.",
        "CPU costs are those of this machine with one thread a worker; "
        f"every value type ({', '.join(measured.value_types)}) was measured, top-k replies travel in that of the push. "
        "Where workers and server have GPUs, the truth lies between both kinds of curve; bytes alone are the upper "
        "bound.",
        f"Beside the table's costs each call of gRPC takes {measured.call * 1e3:.1f} ms of its caller here (two a "
        "step), which CPU costs include.",
        "Published curves: Yan et al., ICPP 2020. Read them as upper bounds: the code of that measurement answers with "
        "the worker's own push, and its ASGD sends float64.",
    ]
    check(plan, section)
    return section
