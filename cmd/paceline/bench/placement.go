package bench

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/sim"
	"github.com/paceline/paceline/sim/shapes"
)

// PlacementPlan describes a comparison of placements over dedicated servers.
type PlacementPlan struct {
	Shapes         []shapes.Shape
	Placements     []string
	Workers        int
	Servers        int
	PartitionBytes int
	Bandwidth      sim.Bandwidth // of each link, each way
	Latency        time.Duration
}

// PlacementRow is one placement of one model.
type PlacementRow struct {
	Model      string  `json:"model"`
	Placement  string  `json:"placement"`
	Partitions int     `json:"partitions"`
	Uneven     float64 `json:"max_mean"`    // bytes of the fullest server over the mean
	Exchange   float64 `json:"exchange_ms"` // of all gradients, in virtual time
	Bound      float64 `json:"bound_ms"`    // of any placement: bytes over bandwidth, with a push and an answer that overlap
}

// PlacementReport is the file that --json writes.
type PlacementReport struct {
	Head
	Workers int            `json:"workers"`
	Servers int            `json:"servers"`
	Rows    []PlacementRow `json:"rows"`
}

// ComparePlacements places each model with each placement, and simulates one exchange: every worker pushes all gradients, those of
// the last layers first, as a backward pass makes them, and waits for all sums.
func ComparePlacements(p PlacementPlan) (PlacementReport, error) {
	r := PlacementReport{Head: NewHead("placement"), Workers: p.Workers, Servers: p.Servers}
	for _, shape := range p.Shapes {
		for _, name := range p.Placements {
			row, err := p.compare(shape, name)
			if err != nil {
				return r, err
			}
			r.Rows = append(r.Rows, row)
		}
	}
	return r, nil
}

func (p PlacementPlan) compare(shape shapes.Shape, name string) (PlacementRow, error) {
	policy, err := placement.Parse(name)
	if err != nil {
		return PlacementRow{}, err
	}
	layout, err := sim.Layout(policy, shape.Elements, p.Servers, p.Servers, p.PartitionBytes)
	if err != nil {
		return PlacementRow{}, err
	}
	row := PlacementRow{Model: shape.Name, Placement: name, Partitions: len(layout)}
	load := make([]float64, p.Servers)
	for _, k := range layout {
		load[k.Server] += float64(k.Bytes)
		row.Uneven = max(row.Uneven, load[k.Server])
	}
	bytes := 4 * float64(shape.Parameters())
	row.Uneven /= bytes / float64(p.Servers)
	if p.Bandwidth > 0 {
		row.Bound = max(bytes, bytes*float64(p.Workers)/float64(p.Servers)) * 8e3 / float64(p.Bandwidth)
	}
	compute, err := sim.ParseCompute("constant:0s")
	if err != nil {
		return row, err
	}
	result, err := sim.Run(sim.Scenario{Workers: p.Workers, Servers: p.Servers, Layout: layout, Iterations: 1, Model: condition.BSP(), Compute: compute,
		Bandwidth: p.Bandwidth, ServerBandwidth: p.Bandwidth, Latency: p.Latency})
	row.Exchange = 1000 * result.Seconds
	return row, err
}

// Show prints the report as a table.
func (r *PlacementReport) Show(out io.Writer) {
	fmt.Fprintf(out, "%d workers, %d dedicated servers; exchanges in virtual time\n", r.Workers, r.Servers)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "model\tplacement\tpartitions\tmax/mean bytes\texchange ms\tbound ms\t\n")
	for _, w := range r.Rows {
		fmt.Fprintf(t, "%s\t%s\t%d\t%.3f\t%.1f\t%.1f\t\n", w.Model, w.Placement, w.Partitions, w.Uneven, w.Exchange, w.Bound)
	}
	_ = t.Flush() // as with Fprintf: there is no one to report to
}
