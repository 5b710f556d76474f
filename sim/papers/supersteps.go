package papers

import (
	"fmt"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/sim"
)

func duration(text string) time.Duration {
	d, err := time.ParseDuration(text)
	if err != nil {
		panic(err)
	}
	return d
}

// elastic is the paper on ElasticBSP: VGG-16, 4 workers, against BSP and SSP.
func (l Lab) elastic() (section, error) {
	s := section{file: "elastic.svg",
		chart: sim.Chart{Title: "Time of 100 iterations of each of 4 workers", Unit: "s", Parts: []string{"compute", "push and pull", "wait"}}}
	s.table.row("model", "alike", "against BSP", "one slow", "against BSP", "hiccups", "against BSP", "staleness, one slow")
	clusters := []string{"lognormal:1s,0.1", "slow:1s,2,0.1", "transient:1s,0.1,3,0.1"}
	var bsp [3]float64
	var best float64
	for _, model := range []string{"bsp", "ssp:3", "elastic:15", "elastic:60", "elastic:240"} {
		cells := []string{"`" + model + "`"}
		var stale float64
		for k, cluster := range clusters {
			r, err := run(sim.Scenario{Workers: 4, Servers: 1, Keys: 8, Iterations: l.Iterations, Until: sim.Total, Compute: compute(cluster),
				Bytes: 528_000_000, Bandwidth: 56e9, ServerBandwidth: 56e9, Latency: 10_000, Seed: l.Seed}, model, condition.Lazy)
			if err != nil {
				return s, err
			}
			each := 100 * r.Seconds / float64(l.Iterations)
			if model == "bsp" {
				bsp[k] = each
			}
			cells = append(cells, seconds(each), times(bsp[k]/each))
			if k == 1 {
				stale = r.Staleness
				if model != "bsp" && model != "ssp:3" {
					best = max(best, bsp[k]/each)
				}
				s.chart.Bars = append(s.chart.Bars, sim.Bar{Label: model + ", one slow", Values: []float64{r.Compute * each, r.Exchange * each, (r.Wait + r.Idle) * each}})
			}
		}
		s.table.row(append(cells, fmt.Sprintf("%.2f", stale))...)
	}
	s.figures = map[string]any{"faster": times(best)}
	return s, nil
}

// adaptive is the paper on adaptive synchronisation: a program disturbs one node from mid-run on.
func (l Lab) adaptive() (section, error) {
	s := section{file: "adaptive.svg",
		chart: sim.Chart{Title: "Time of 100 iterations of each of 3 workers", Unit: "s", Parts: []string{"compute", "push and pull", "wait"}}}
	s.table.row("model", "the paper's", "time", "against its s = 1", "waiting", "staleness", "greatest lead")
	var first, last float64
	var lead uint64
	for _, m := range [][2]string{{"ssp:0", "SSP, s = 1"}, {"ssp:1", "SSP, s = 2"}, {"ssp:2", "SSP, s = 3"}, {"adaptive:1,1", "adaptive, w = 1"}} {
		r, err := run(sim.Scenario{Workers: 3, Servers: 1, Keys: 4, Iterations: l.Iterations, Until: sim.Total,
			Compute: compute(fmt.Sprintf("slow:100ms,3,0.05,%d", l.Iterations/2)),
			Bytes:   1_700_000, Bandwidth: 1e9, ServerBandwidth: 1e9, Latency: 100_000, Seed: l.Seed}, m[0], condition.Lazy)
		if err != nil {
			return s, err
		}
		each := 100 * r.Seconds / float64(l.Iterations)
		if first == 0 {
			first = each
		}
		last, lead = each, r.MaxLead
		s.table.row("`"+m[0]+"`", m[1], seconds(each), times(first/each), percent(r.Wait), fmt.Sprintf("%.2f", r.Staleness), fmt.Sprint(r.MaxLead))
		s.chart.Bars = append(s.chart.Bars, sim.Bar{Label: m[1], Values: []float64{r.Compute * each, r.Exchange * each, (r.Wait + r.Idle) * each}})
	}
	s.figures = map[string]any{"faster": times(first / last), "lead": lead}
	return s, nil
}

// scale is a job of a size that no paper has.
func (l Lab) scale() (section, error) {
	servers := min(200, max(1, l.Scale/50))
	s := section{file: "scale.svg",
		chart: sim.Chart{Title: fmt.Sprintf("2 iterations of %d workers", l.Scale), Unit: "s", Parts: []string{"compute", "push and pull", "wait"}}}
	s.table.row("model", "time", "iterations/s", "pulls", "DPRs", "events")
	for _, model := range []string{"bsp", "ssp:1"} {
		r, err := run(sim.Scenario{Workers: l.Scale, Servers: servers, Keys: 1, Iterations: 2, Compute: compute("lognormal:5s,0.2"),
			Bytes: 100_000_000, Bandwidth: 10e9, ServerBandwidth: 400e9, Latency: 100_000, Seed: l.Seed}, model, condition.Lazy)
		if err != nil {
			return s, err
		}
		s.table.row("`"+model+"`", seconds(r.Seconds), fmt.Sprintf("%.0f", r.Throughput), fmt.Sprint(r.Pulls), fmt.Sprint(r.Delayed), fmt.Sprint(r.Events))
		s.chart.Bars = append(s.chart.Bars, sim.Bar{Label: model, Values: []float64{r.Compute * r.Seconds, r.Exchange * r.Seconds, (r.Wait + r.Idle) * r.Seconds}})
	}
	s.figures = map[string]any{"workers": l.Scale, "servers": servers}
	return s, nil
}
