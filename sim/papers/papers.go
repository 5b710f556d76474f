// Package papers repeats the experiments of the papers on synchronisation models and on placement in virtual time, and
// writes the results beside the papers' figures. Only shapes compare: the papers describe their machines in a few
// words, so each experiment names its model of them.
package papers

import (
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/sim"
)

// Lab is the size of the experiments.
type Lab struct {
	Iterations int    // of each worker
	Scale      int    // workers of the largest job
	Seed       uint64 // of all of them
}

// Default is the lab of docs/results.md: under a minute on one core.
func Default() Lab { return Lab{Iterations: 400, Scale: sim.MaxWorkers, Seed: 1} }

// text is what the page says around the tables and figures of the experiments.
//
//go:embed page.md
var text string

// section is what one experiment has for the page.
type section struct {
	file    string // of the chart
	chart   sim.Chart
	table   table
	figures map[string]any // by name in the text
}

// Between these two lines the page is generated.
const (
	beginMark = "<!-- sim:begin -->"
	endMark   = "<!-- sim:end -->"
)

// empty is the beginning of a new page.
const empty = "# Results\n\n" + beginMark + "\n" + endMark + "\n"

// Write runs all experiments, writes their charts to dir/results and their text into dir/results.md.
func (l Lab) Write(dir string) error {
	file := filepath.Join(dir, "results.md")
	old, err := os.ReadFile(file)
	if os.IsNotExist(err) {
		old, err = []byte(empty), nil
	}
	if err != nil {
		return err
	}
	head, rest, found := strings.Cut(string(old), beginMark)
	_, tail, closed := strings.Cut(rest, endMark)
	if !found || !closed {
		return fmt.Errorf("%s has no lines %s and %s to write between: put them at the place of the simulated results", file, beginMark, endMark)
	}
	charts := filepath.Join(dir, "results")
	if err := os.MkdirAll(charts, 0o777); err != nil {
		return err
	}
	results := map[string]map[string]any{}
	for name, experiment := range map[string]func() (section, error){
		"models": l.models, "bounds": l.bounds, "parking": l.parking, "overlap": l.overlap, "elastic": l.elastic, "adaptive": l.adaptive, "scale": l.scale,
		"oneStraggler": l.oneStraggler, "slowLinks": l.slowLinks, "slowProcessors": l.slowProcessors, "moreStragglers": l.moreStragglers,
		"scalingOut": l.scalingOut, "transient": l.transient, "sensitivity": l.sensitivity, "suspension": l.suspension,
	} {
		s, err := experiment()
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(charts, s.file), []byte(s.chart.SVG()), 0o666); err != nil {
			return err
		}
		results[name] = s.figures
		results[name]["table"] = s.table
	}
	page, err := template.New("page.md").Option("missingkey=error").Parse(text)
	if err != nil {
		return err
	}
	var simulated strings.Builder
	if err := page.Execute(&simulated, results); err != nil {
		return err
	}
	return os.WriteFile(file, []byte(head+beginMark+"\n"+simulated.String()+endMark+tail), 0o666)
}

// run runs a scenario under the model of a setting.
func run(s sim.Scenario, model string, parking condition.Parking) (sim.Result, error) {
	m, err := condition.Parse(model)
	if err != nil {
		return sim.Result{}, err
	}
	s.Model, s.Parking = m, parking
	return sim.Run(s)
}

// compute parses a setting of this package.
func compute(setting string) sim.Compute {
	c, err := sim.ParseCompute(setting)
	if err != nil {
		panic(err)
	}
	return c
}

// table is a table in Markdown; its first row is the heading.
type table [][]string

func (t *table) row(cells ...string) { *t = append(*t, cells) }

func (t table) String() string {
	var b strings.Builder
	for k, cells := range t {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | "))
		if k == 0 {
			b.WriteString("|---" + strings.Repeat("|---:", len(cells)-1) + "|\n")
		}
	}
	return b.String()
}

// pairs is a chart of our figures beside the paper's.
func pairs(title, unit string) sim.Chart {
	return sim.Chart{Title: title, Unit: unit, Parts: []string{"here", "paper"}}
}

func pair(c *sim.Chart, label string, here, paper float64) {
	c.Bars = append(c.Bars, sim.Bar{Label: label, Values: []float64{here, 0}}, sim.Bar{Values: []float64{0, paper}})
}

func seconds(v float64) string { return fmt.Sprintf("%.2f s", v) }
func millis(v float64) string  { return fmt.Sprintf("%.1f ms", 1000*v) }
func count(v float64) string   { return fmt.Sprintf("%.0f", v) }
func times(v float64) string   { return fmt.Sprintf("%.2f×", v) }
func percent(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) }

// change is the difference of two figures, in percent of the second.
func change(v, from float64) string {
	if from == 0 {
		return "–"
	}
	return strings.Replace(fmt.Sprintf("%+.1f %%", 100*(v/from-1)), "-", "−", 1)
}
