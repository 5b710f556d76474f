package papers

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/paceline/paceline/sim"
	"github.com/paceline/paceline/sim/shapes"
)

// period is the time between two reports of workers; the paper says only "periodically".
const period = 10 * time.Second

// history is images per second in parts of a job's time.
type history struct {
	speeds  []float64 // by part
	remaps  []int     // in the part
	servers []int     // at its end
}

// play runs a job whose servers change at the ends of parts, which are multiples of a period.
func play(j *sim.Job, perIteration float64, ends []time.Duration, change func(j *sim.Job, part int)) (history, error) {
	var h history
	for part, end := range ends {
		change(j, part)
		began, images, before := j.Now, 0., j.Remaps
		for j.Now < end {
			if _, err := j.Iterate(); err != nil {
				return h, err
			}
			images += perIteration
		}
		h.speeds = append(h.speeds, images/(j.Now-began).Seconds())
		h.remaps = append(h.remaps, j.Remaps-before)
		h.servers = append(h.servers, len(j.Servers))
	}
	return h, nil
}

func at(seconds ...int) (t []time.Duration) {
	for _, s := range seconds {
		t = append(t, time.Duration(s)*time.Second)
	}
	return t
}

// degrade gives the first servers links of this bandwidth.
func degrade(j *sim.Job, n int, link sim.Bandwidth) {
	j.Servers = slices.Clone(j.Servers)
	for i := range n {
		j.Servers[i].Link = link
	}
}

// scalingOut is figure 17 of PSLD: 6 of 8 servers get 1 Gbit/s at 120 s, VGG-16.
func (l Lab) scalingOut() (section, error) {
	s := section{file: "psld-scaling-out.svg", chart: sim.Chart{Title: "VGG-16, images per second, 6 of 8 servers at 1 Gbit/s from 120 s on"}}
	ends := at(120, 130, 150, 180, 240, 360)
	head := []string{"placement"}
	for i, end := range ends {
		from := time.Duration(0)
		if i > 0 {
			from = ends[i-1]
		}
		head = append(head, fmt.Sprintf("%.0f to %.0f s", from.Seconds(), end.Seconds()))
	}
	s.table.row(append(head, "servers at the end")...)
	var grown []float64
	for _, c := range []struct {
		name, setting string
		most          int
	}{{"MXNet's", byDefault, 0}, {"proportional", bySpeed, 0}, {"PSLD without more servers", byPSLD, 0}, {"PSLD", byPSLD, 16}} {
		j, err := l.job(vggTrained, c.setting, 8, unit, servers(8, 0, sim.Server{}))
		if err != nil {
			return s, err
		}
		j.Period, j.Most = period, c.most
		h, err := play(j, float64(8*vggTrained.batch), ends, func(j *sim.Job, part int) {
			if part == 1 {
				degrade(j, 6, slow)
			}
		})
		if err != nil {
			return s, err
		}
		row := []string{c.name}
		labels := []string{}
		for i, v := range h.speeds {
			row, labels = append(row, images(v)), append(labels, head[i+1])
		}
		s.table.row(append(row, fmt.Sprint(h.servers[len(ends)-1]))...)
		bars(&s.chart, c.name, labels, h.speeds)
		grown = h.speeds
	}
	s.figures = map[string]any{"drop": percent(1 - grown[1]/grown[0]), "back": percent(grown[len(grown)-1] / grown[0])}
	return s, nil
}

// transient is figure 18 of PSLD: two of 4 servers have 1 Gbit/s from 90 to 360 s, ResNet-50.
func (l Lab) transient() (section, error) {
	s := section{file: "psld-transient.svg", chart: sim.Chart{Title: "ResNet-50, images per second, two of 4 servers at 1 Gbit/s from 90 to 360 s"}}
	ends := at(90, 100, 360, 370, 600)
	s.table.row("placement", "0 to 90 s", "90 to 100 s, slow", "100 to 360 s, slow", "360 to 370 s", "370 to 600 s", "remaps while slow", "remaps from 370 s on")
	got := map[string]history{}
	for i, setting := range compared {
		j, err := l.job(resnetTrained, setting, 4, unit, servers(4, 0, sim.Server{}))
		if err != nil {
			return s, err
		}
		j.Period = period
		h, err := play(j, float64(4*resnetTrained.batch), ends, func(j *sim.Job, part int) {
			switch part {
			case 1:
				degrade(j, 2, slow)
			case 3:
				degrade(j, 2, fast)
			}
		})
		if err != nil {
			return s, err
		}
		got[setting] = h
		row := []string{names[i]}
		for _, v := range h.speeds {
			row = append(row, images(v))
		}
		s.table.row(append(row, fmt.Sprint(h.remaps[1]+h.remaps[2]), fmt.Sprint(h.remaps[4]))...)
		bars(&s.chart, names[i], []string{"before", "first 10 s slow", "slow", "first 10 s recovered", "recovered"}, h.speeds)
	}
	best, base, strawman, greedy := got[byPSLD].speeds, got[byDefault].speeds, got[bySpeed].speeds, got[exploits].speeds
	s.figures = map[string]any{"slow": times(best[2] / base[2]), "after": times(best[4] / strawman[4]), "greedy": times(best[4] / greedy[4]), "strawman": percent(strawman[4] / strawman[0])}
	return s, nil
}

// sensitivity is figure 19 of PSLD: its thresholds, one by one, with VGG-16 and two stragglers, and six for the last one.
func (l Lab) sensitivity() (section, error) {
	s := section{file: "psld-sensitivity.svg", figures: map[string]any{}, chart: sim.Chart{Title: "VGG-16, images per second, two of 8 servers at 1 Gbit/s"}}
	s.table.row("setting", "value", "images/s", "of the best")
	two := servers(8, 2, sim.Server{Link: slow})
	type point struct {
		label string
		speed float64
	}
	add := func(name string, points []point) (best point) {
		best = slices.MaxFunc(points, func(a, b point) int { return cmp.Compare(a.speed, b.speed) })
		s.chart.Bars = append(s.chart.Bars, sim.Bar{Label: name})
		for _, p := range points {
			s.table.row(name, p.label, fmt.Sprintf("%.1f", p.speed), percent(p.speed/best.speed))
			s.chart.Bars = append(s.chart.Bars, sim.Bar{Label: p.label, Values: []float64{p.speed}, Text: images(p.speed)})
		}
		return best
	}
	var explored, weighed, cut, grown []point
	for _, epsilon := range []string{"0", "0.05", "0.1", "0.2", "0.4"} {
		v, err := l.settled(vggTrained, "psld:"+epsilon, 8, unit, two)
		if err != nil {
			return s, err
		}
		explored = append(explored, point{epsilon, v})
	}
	for _, ratio := range []string{"0", "0.1", "1", "10", "100"} {
		v, err := l.settled(vggTrained, "psld:0.1,"+ratio, 8, unit, two)
		if err != nil {
			return s, err
		}
		weighed = append(weighed, point{ratio, v})
	}
	for _, mib := range []int{1, 2, 4, 8, 16, 64} {
		v, err := l.settled(vggTrained, byPSLD, 8, mib<<20, two)
		if err != nil {
			return s, err
		}
		cut = append(cut, point{fmt.Sprintf("%d MiB", mib), v})
	}
	for _, scale := range []string{"0", "0.25", "0.5", "0.75", "1"} {
		j, err := l.job(vggTrained, "psld:0.1,1,1,"+scale, 8, unit, servers(8, 6, sim.Server{Link: slow}))
		if err != nil {
			return s, err
		}
		j.Period, j.Most = period, 24
		h, err := play(j, float64(8*vggTrained.batch), at(240, 480), func(*sim.Job, int) {})
		if err != nil {
			return s, err
		}
		grown = append(grown, point{fmt.Sprintf("%s (%d servers)", scale, h.servers[1]), h.speeds[1]})
	}
	add("ε", explored)
	add("θ₁/θ₀", weighed)
	add("unit", cut)
	s.figures["threshold"] = add("threshold of scaling out", grown).label
	return s, nil
}

// suspension is figure 20 of PSLD: a remap beside a checkpoint and a restart.
func (l Lab) suspension() (section, error) {
	s := section{file: "psld-suspension.svg", chart: sim.Chart{Title: "Training suspended, 8 workers and 8 servers, two at 1 Gbit/s", Unit: "s", Parts: []string{"remap", "checkpoint"}}}
	s.table.row("model", "workers, servers", "remap", "write and read a checkpoint", "less")
	const disk = 500e6 // bytes in a second, of a SATA SSD as in the paper's cluster
	const restart = 2. // seconds, far below what starting processes and importing a framework take
	least, most, restarted := 1., 0., 1.
	for _, m := range []trained{alexnetTrained, resnetTrained, vggTrained} {
		for _, n := range []int{2, 4, 8} {
			j, err := l.job(m, byPSLD, n, unit, servers(n, min(2, n-1), sim.Server{Link: slow}))
			if err != nil {
				return s, err
			}
			var longest time.Duration
			for range 8 {
				if _, err := j.Iterate(); err != nil {
					return s, err
				}
				longest = max(longest, j.Boundary+4*j.Scenario.Latency)
			}
			shape, _ := shapes.Named(m.shape)
			saved := 2 * 4 * float64(shape.Parameters()) / disk
			less := 1 - longest.Seconds()/saved
			least, most = min(least, less), max(most, longest.Seconds())
			restarted = min(restarted, 1-longest.Seconds()/(saved+restart))
			s.table.row(m.name, fmt.Sprint(n), millis(longest.Seconds()), millis(saved), percent(less))
			if n == 8 {
				s.chart.Bars = append(s.chart.Bars, sim.Bar{Label: m.name, Values: []float64{longest.Seconds(), 0}}, sim.Bar{Values: []float64{0, saved}})
			}
		}
	}
	s.figures = map[string]any{"least": percent(least), "most": millis(most), "restarted": percent(restarted)}
	return s, nil
}
