package papers

import (
	"fmt"
	"slices"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/sim"
)

// per100 is a run in the form of the paper's tables: for 100 iterations of every worker.
type per100 struct{ time, delays float64 }

func measure(s sim.Scenario, model string, parking condition.Parking) (per100, error) {
	r, err := run(s, model, parking)
	return per100{100 * r.Seconds / float64(s.Iterations), r.Delays(100, s.Workers)}, err
}

var parkings = []condition.Parking{condition.SoftBarrier, condition.Lazy}

// alexnet is FluentPS's cluster of 64 workers and 1 server at 1 Gbit/s. The model's size makes the
// server's link nearly full, as 45.85 s for 100 iterations under ASP imply.
func (l Lab) alexnet() sim.Scenario {
	return sim.Scenario{Workers: 64, Servers: 1, Keys: 1, Iterations: l.Iterations, Compute: compute("spread:150ms,350ms,0.4"),
		Bytes: 880_000, Bandwidth: 1e9, ServerBandwidth: 1e9, Latency: 100_000, Seed: l.Seed}
}

// models is Table IV of FluentPS, AlexNet on CIFAR-10: PSSP against SSP at the same s.
func (l Lab) models() (section, error) {
	published := []struct {
		name, model string
		paper       [2]per100 // soft barrier, lazy
	}{
		{"ASP", "asp", [2]per100{{45.85, 0}, {45.85, 0}}},
		{"PSSP, c = 0.1", "pssp:3,0.1", [2]per100{{52.95, 23.65}, {58.85, 24.80}}},
		{"PSSP, c = 0.3", "pssp:3,0.3", [2]per100{{56.67, 126.1}, {60.96, 112.5}}},
		{"PSSP, c = 0.5", "pssp:3,0.5", [2]per100{{58.71, 350.3}, {63.89, 254.0}}},
		{"SSP", "ssp:3", [2]per100{{80.77, 4002}, {64.62, 336.8}}},
	}
	s := section{file: "pssp-ssp.svg", chart: pairs("100 iterations, s = 3", "s")}
	s.table.row("model", "parking", "time here", "paper", "DPRs here", "paper")
	got := map[string]per100{}
	for k, parking := range parkings {
		for _, p := range published {
			r, err := measure(l.alexnet(), p.model, parking)
			if err != nil {
				return s, err
			}
			got[p.model+parking.String()] = r
			s.table.row(p.name, parking.String(), seconds(r.time), seconds(p.paper[k].time), count(r.delays), count(p.paper[k].delays))
			pair(&s.chart, p.name+", "+parking.String(), r.time, p.paper[k].time)
		}
	}
	others, err := l.others()
	if err != nil {
		return s, err
	}
	fast := l.alexnet()
	fast.ServerBandwidth *= 10
	var free [2]per100
	for k, parking := range parkings {
		var err error
		if free[k], err = measure(fast, "ssp:3", parking); err != nil {
			return s, err
		}
	}
	ssp, half, lazy := got["ssp:3soft-barrier"], got["pssp:3,0.5soft-barrier"], got["ssp:3lazy"]
	s.figures = map[string]any{
		"half": times(ssp.time / half.time), "lazy": times(ssp.time / lazy.time), "fewer": change(lazy.delays, ssp.delays), "delayed": count(ssp.delays),
		"freeSoft": seconds(free[0].time), "freeLazy": seconds(free[1].time), "others": others, "halfDelayed": count(half.delays),
	}
	return s, nil
}

// others shows how the figures depend on the cluster that models the paper's.
func (l Lab) others() (string, error) {
	var pssp, lazy, bounds []float64
	for _, bytes := range []int64{360_000, 600_000, 880_000} {
		for _, setting := range []string{"spread:150ms,300ms,0.2", "spread:200ms,350ms,0.3", "spread:250ms,350ms,0.1", "lognormal:250ms,0.3"} {
			c := l.alexnet()
			c.Bytes, c.Compute = bytes, compute(setting)
			var t [5]float64
			for k, m := range []string{"ssp:3", "pssp:3,0.5", "ssp:12", "pssp:3,0.1", "ssp:3"} {
				r, err := measure(c, m, parkings[k/4]) // the last one lazily
				if err != nil {
					return "", err
				}
				t[k] = r.time
			}
			pssp, bounds, lazy = append(pssp, t[0]/t[1]), append(bounds, t[3]/t[2]), append(lazy, t[0]/t[4])
		}
	}
	return fmt.Sprintf("%d of them with 360 to 880 KB and other paces: PSSP against SSP %s to %s, lazy against soft barrier %s to %s,\n  and at an equal bound (c = 1/10 below) PSSP takes %s to %s of SSP's time",
		len(pssp), times(slices.Min(pssp)), times(slices.Max(pssp)), times(slices.Min(lazy)), times(slices.Max(lazy)), percent(slices.Min(bounds)), percent(slices.Max(bounds))), nil
}

// bounds is figure 9 of FluentPS: PSSP(3, c) against SSP(s') at equal regret bounds.
func (l Lab) bounds() (section, error) {
	s := section{file: "equal-bounds.svg", chart: sim.Chart{Title: "Delayed pulls in 100 iterations", Parts: []string{"PSSP", "SSP"}}}
	s.table.row("PSSP", "SSP", "parking", "time PSSP", "SSP", "change", "DPRs PSSP", "SSP", "change")
	var last [2]struct{ pssp, ssp per100 }
	for k, parking := range parkings {
		for _, c := range []struct {
			c     float64
			name  string
			prime uint64
		}{{1. / 2, "1/2", 4}, {1. / 3, "1/3", 5}, {1. / 5, "1/5", 7}, {1. / 10, "1/10", 12}} {
			pssp, err := measure(l.alexnet(), condition.PSSP(3, c.c, 0).Name, parking)
			if err != nil {
				return s, err
			}
			ssp, err := measure(l.alexnet(), condition.SSP(c.prime).Name, parking)
			if err != nil {
				return s, err
			}
			last[k].pssp, last[k].ssp = pssp, ssp
			s.table.row("s = 3, c = "+c.name, fmt.Sprintf("s' = %d", c.prime), parking.String(), seconds(pssp.time), seconds(ssp.time), change(pssp.time, ssp.time),
				count(pssp.delays), count(ssp.delays), change(pssp.delays, ssp.delays))
			label := fmt.Sprintf("c = %s, %s", c.name, parking)
			s.chart.Bars = append(s.chart.Bars, sim.Bar{Label: label, Values: []float64{pssp.delays, 0}}, sim.Bar{Label: fmt.Sprintf("s' = %d", c.prime), Values: []float64{0, ssp.delays}})
		}
	}
	soft, lazy := last[0], last[1]
	s.figures = map[string]any{
		"softTime": change(soft.pssp.time, soft.ssp.time), "softDelays": change(soft.pssp.delays, soft.ssp.delays),
		"sspTime": times(soft.ssp.time / lazy.ssp.time), "sspDelays": change(lazy.ssp.delays, soft.ssp.delays),
		"lazyDelays": change(lazy.pssp.delays, lazy.ssp.delays),
	}
	return s, nil
}

// resnet is FluentPS's cluster of 8 servers, ResNet-56 on CIFAR-10 (0.85 million parameters).
func (l Lab) resnet() sim.Scenario {
	return sim.Scenario{Workers: 32, Servers: 8, Keys: 1, Iterations: l.Iterations, Compute: compute("spread:200ms,300ms,0.1"),
		Bytes: 3_400_000, Bandwidth: 1e9, ServerBandwidth: 1e9, Latency: 100_000, Seed: l.Seed}
}

// parking is figure 8 of FluentPS and its rows of Table IV: lazy parking against the soft barrier.
func (l Lab) parking() (section, error) {
	s := section{file: "parking.svg", chart: pairs("100 iterations, SSP with s = 2", "s")}
	s.table.row("parking", "time here", "paper", "DPRs here", "paper", "staleness here")
	var got [2]per100
	for k, paper := range []per100{{46.57, 15160}, {39.16, 115.1}} {
		r, err := run(l.resnet(), "ssp:2", parkings[k])
		if err != nil {
			return s, err
		}
		got[k] = per100{100 * r.Seconds / float64(l.Iterations), r.Delays(100, 32)}
		s.table.row(parkings[k].String(), seconds(got[k].time), seconds(paper.time), count(got[k].delays), count(paper.delays), fmt.Sprintf("%.2f", r.Staleness))
		pair(&s.chart, parkings[k].String(), got[k].time, paper.time)
	}
	s.figures = map[string]any{"faster": times(got[0].time / got[1].time), "fewer": change(got[1].delays, got[0].delays)}
	return s, nil
}

// overlap is figure 6 of FluentPS: each server for itself against a global barrier, under BSP.
func (l Lab) overlap() (section, error) {
	s := section{file: "overlap.svg",
		chart: sim.Chart{Title: "An iteration under BSP", Unit: "s", Parts: []string{"compute", "push and pull", "wait"}}}
	s.table.row("workers", "model", "latency", "global", "overlap", "faster", "communication saved")
	most, saved := 0.0, 0.0
	for _, c := range []struct {
		workers int
		bytes   int64
		name    string
		latency string
	}{
		{8, 3_400_000, "3.4 MB", "100µs"}, {16, 3_400_000, "3.4 MB", "100µs"}, {32, 3_400_000, "3.4 MB", "100µs"},
		{8, 100_000_000, "100 MB", "100µs"}, {32, 100_000_000, "100 MB", "100µs"}, {8, 34_000, "34 KB", "1ms"},
	} {
		sc := l.resnet()
		sc.Workers, sc.Keys, sc.Bytes, sc.Iterations = c.workers, 8, c.bytes, max(1, l.Iterations/8)
		sc.Latency = duration(c.latency)
		sc.Compute = compute(fmt.Sprintf("lognormal:%dms,0.05", 8000/c.workers))
		if c.bytes < 1_000_000 {
			sc.Compute = compute("constant:1ms")
		}
		var r [2]sim.Result
		for k, barrier := range []sim.Barrier{sim.Global, sim.Overlap} {
			sc.Barrier = barrier
			var err error
			if r[k], err = run(sc, "bsp", condition.Lazy); err != nil {
				return s, err
			}
			each := r[k].Seconds / float64(sc.Iterations)
			s.chart.Bars = append(s.chart.Bars, sim.Bar{Label: fmt.Sprintf("%d workers, %s, %v", c.workers, c.name, barrier),
				Values: []float64{r[k].Compute * each, r[k].Exchange * each, (r[k].Wait + r[k].Idle) * each}})
		}
		faster := r[0].Seconds / r[1].Seconds
		less := 1 - (1-r[1].Compute)*r[1].Seconds/((1-r[0].Compute)*r[0].Seconds)
		most, saved = max(most, faster), max(saved, less)
		s.table.row(fmt.Sprint(c.workers), c.name, c.latency, millis(r[0].Seconds/float64(sc.Iterations)), millis(r[1].Seconds/float64(sc.Iterations)), times(faster), percent(less))
	}
	s.figures = map[string]any{"faster": times(most), "saved": percent(saved)}
	return s, nil
}
