package papers

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/sim"
	"github.com/paceline/paceline/sim/shapes"
)

// trained is one of PSLD's workloads (section 6.1): images of a worker's batch, and the time of computing them on its GPU, which is our choice.
type trained struct {
	name, shape string
	batch       int
	compute     string
}

var (
	alexnetTrained = trained{"AlexNet", "alexnet", 32, "constant:30ms"}
	resnetTrained  = trained{"ResNet-50", "resnet50", 32, "constant:160ms"}
	vggTrained     = trained{"VGG-16", "vgg16", 64, "constant:450ms"}
)

// Placements that PSLD is compared with: mxnet is its baseline, proportional its strawman. PSLD's units are of 4 MiB.
const (
	byDefault = "mxnet"
	byTurns   = "tensorflow"
	bySpeed   = "proportional"
	byPSLD    = "psld"
	exploits  = "psld:0"
	unit      = 4 << 20
)

const (
	fast = sim.Bandwidth(10e9)
	slow = sim.Bandwidth(1e9)
)

// servers is n servers, the first of which are stragglers.
func servers(n, stragglers int, straggler sim.Server) []sim.Server {
	s := slices.Repeat([]sim.Server{{Link: fast, Processor: straggler.Processor}}, n)
	if straggler.Processor != 0 {
		for i := range s {
			s[i].Processor = processor
		}
	}
	for i := range stragglers {
		s[i] = straggler
	}
	return s
}

// processor is what a server's 4 cores add in the experiment with disturbed processors.
const processor = sim.Bandwidth(40e9)

func (l Lab) job(m trained, setting string, workers, unit int, of []sim.Server) (*sim.Job, error) {
	policy, err := placement.Parse(setting)
	if err != nil {
		return nil, err
	}
	shape, known := shapes.Named(m.shape)
	if !known {
		return nil, fmt.Errorf("no shape is named %s", m.shape)
	}
	spread := 1
	if !policy.Remaps() {
		spread, unit = len(of), math.MaxInt32 // as the framework cuts, which has no units
	}
	layout, err := sim.Layout(policy, shape.Elements, len(of), spread, unit)
	if err != nil {
		return nil, err
	}
	return &sim.Job{Policy: policy, Servers: of, Newcomer: sim.Server{Link: fast},
		Scenario: sim.Scenario{Workers: workers, Layout: layout, Compute: compute(m.compute), Bandwidth: fast, Latency: 50 * time.Microsecond, Seed: l.Seed}}, nil
}

// settled is the images per second of a job that has remapped its keys a few times: the mean over iterations after as many remaps with
// several seeds, because PSLD explores at random.
func (l Lab) settled(m trained, setting string, workers, unit int, of []sim.Server) (float64, error) {
	var sum time.Duration
	iterations := 0
	for seed := range uint64(max(1, l.Iterations/80)) {
		j, err := l.job(m, setting, workers, unit, of)
		if err != nil {
			return 0, err
		}
		j.Scenario.Seed += seed
		for i := range 7 {
			took, err := j.Iterate()
			if err != nil {
				return 0, err
			}
			if i >= 3 {
				sum, iterations = sum+took, iterations+1
			}
		}
	}
	return float64(iterations*workers*m.batch) / sum.Seconds(), nil
}

// speeds is the images per second under several placements.
func (l Lab) speeds(m trained, workers int, of []sim.Server, settings ...string) ([]float64, error) {
	var got []float64
	for _, setting := range settings {
		v, err := l.settled(m, setting, workers, unit, of)
		if err != nil {
			return nil, err
		}
		got = append(got, v)
	}
	return got, nil
}

var compared = []string{byDefault, byTurns, bySpeed, exploits, byPSLD}

func images(v float64) string { return fmt.Sprintf("%.0f", v) }

// oneStraggler is figure 11 of PSLD: one of the servers has a link of 1 Gbit/s.
func (l Lab) oneStraggler() (section, error) {
	s := section{file: "psld-one-straggler.svg", chart: sim.Chart{Title: "Images per second, 8 workers, one of 8 servers at 1 Gbit/s"}, figures: map[string]any{}}
	s.table.row("model", "workers, servers", "MXNet's, no straggler", "MXNet's", "TensorFlow's", "proportional", "PSLD, ε = 0", "PSLD",
		"PSLD to MXNet's (paper)", "to proportional (paper)", "to no straggler (paper)")
	for _, m := range []struct {
		trained
		paper [3]string
	}{{alexnetTrained, [3]string{"3.24×", "1.53×", "1.68×"}}, {resnetTrained, [3]string{"2.09×", "1.13×", "1.30×"}}, {vggTrained, [3]string{"3.86×", "1.29×", "1.62×"}}} {
		for _, n := range []int{2, 4, 8} {
			free, err := l.speeds(m.trained, n, servers(n, 0, sim.Server{}), byDefault)
			if err != nil {
				return s, err
			}
			got, err := l.speeds(m.trained, n, servers(n, 1, sim.Server{Link: slow}), compared...)
			if err != nil {
				return s, err
			}
			beside := func(v float64, k int) string { return fmt.Sprintf("%s (%s)", times(v), m.paper[k]) }
			s.table.row(m.name, fmt.Sprint(n), images(free[0]), images(got[0]), images(got[1]), images(got[2]), images(got[3]), images(got[4]),
				beside(got[4]/got[0], 0), beside(got[4]/got[2], 1), beside(got[4]/free[0], 2))
			if n == 8 {
				s.figures[m.shape+"Greedy"] = times(got[3] / got[2])
			}
			if n == 8 {
				bars(&s.chart, m.name, append([]string{"MXNet's, no straggler"}, names...), append(free, got...))
			}
		}
	}
	return s, nil
}

var names = []string{"MXNet's", "TensorFlow's", "proportional", "PSLD, ε = 0", "PSLD"}

// bars adds a heading and a bar for each placement.
func bars(c *sim.Chart, heading string, labels []string, values []float64) {
	c.Bars = append(c.Bars, sim.Bar{Label: heading})
	for i, v := range values {
		c.Bars = append(c.Bars, sim.Bar{Label: labels[i], Values: []float64{v}, Text: images(v)})
	}
}

// sweep is a table of speeds with stragglers of several kinds, 8 workers and 8 servers.
func (l Lab) sweep(s *section, m trained, label string, of []sim.Server) ([]float64, error) {
	got, err := l.speeds(m, 8, of, compared...)
	if err != nil {
		return nil, err
	}
	s.table.row(m.name, label, images(got[0]), images(got[1]), images(got[2]), images(got[3]), images(got[4]), times(got[4]/got[0]), times(got[4]/got[2]), times(got[3]/got[2]))
	return got, nil
}

var sweepHead = []string{"MXNet's", "TensorFlow's", "proportional", "PSLD, ε = 0", "PSLD", "PSLD to MXNet's", "to proportional", "ε = 0 to proportional"}

// slowLinks is figure 12 of PSLD: two stragglers, by their bandwidth.
func (l Lab) slowLinks() (section, error) {
	s := section{file: "psld-links.svg", chart: sim.Chart{Title: "VGG-16, images per second, two of 8 servers with slow links"}}
	s.table.row(append([]string{"model", "their links"}, sweepHead...)...)
	var most float64
	for _, m := range []trained{alexnetTrained, resnetTrained, vggTrained} {
		for _, link := range []sim.Bandwidth{5e9, 2e9, 1e9, 5e8} {
			label := fmt.Sprintf("%g Gbit/s", float64(link)/1e9)
			got, err := l.sweep(&s, m, label, servers(8, 2, sim.Server{Link: link}))
			if err != nil {
				return s, err
			}
			most = max(most, got[4]/got[0])
			if m == vggTrained {
				bars(&s.chart, label, names, got)
			}
		}
	}
	s.figures = map[string]any{"most": times(most)}
	return s, nil
}

// disturbed is 8 servers, two of which have this share of their processor.
func disturbed(share float64) []sim.Server {
	return servers(8, 2, sim.Server{Link: fast, Processor: sim.Bandwidth(share) * processor})
}

// slowProcessors is figure 13 of PSLD: two stragglers, by the share of the processor that a program leaves them.
func (l Lab) slowProcessors() (section, error) {
	s := section{file: "psld-processors.svg", chart: sim.Chart{Title: "VGG-16, images per second, two of 8 servers with disturbed processors"}}
	s.table.row(append([]string{"model", "their processors"}, sweepHead...)...)
	var most, less float64
	for _, m := range []trained{alexnetTrained, resnetTrained, vggTrained} {
		for _, share := range []float64{0.5, 0.25, 0.1, 0.05} {
			label := fmt.Sprintf("%g %%", 100*share)
			got, err := l.sweep(&s, m, label, disturbed(share))
			if err != nil {
				return s, err
			}
			most, less = max(most, got[4]/got[0]), max(less, 1-got[2]/got[4])
			if m == vggTrained {
				bars(&s.chart, label, names, got)
			}
		}
	}
	s.figures = map[string]any{"most": times(most), "less": percent(less)}
	return s, nil
}

// moreStragglers is figure 14 of PSLD: up to four servers at 1 Gbit/s.
func (l Lab) moreStragglers() (section, error) {
	s := section{file: "psld-stragglers.svg", chart: sim.Chart{Title: "VGG-16, images per second, 8 workers, some of 8 servers at 1 Gbit/s"}}
	s.table.row(append([]string{"model", "stragglers"}, sweepHead...)...)
	s.figures = map[string]any{}
	for _, m := range []trained{resnetTrained, vggTrained} {
		for n := 1; n <= 4; n++ {
			got, err := l.sweep(&s, m, fmt.Sprint(n), servers(8, n, sim.Server{Link: slow}))
			if err != nil {
				return s, err
			}
			if m == vggTrained {
				bars(&s.chart, fmt.Sprintf("%d stragglers", n), names, got)
			}
			if n == 4 {
				s.figures[m.shape+"Default"], s.figures[m.shape+"Speed"] = times(got[4]/got[0]), times(got[4]/got[2])
			}
		}
	}
	return s, nil
}
