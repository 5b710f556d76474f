package jobtest

import (
	"fmt"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/worker"
)

// Group are values that a rank steps together under a model with supersteps; all of one length.
type Group struct {
	Rank   int
	Values []*Held

	j *Job
}

// Group declares values of n elements each: all tens.
func (j *Job) Group(rank int, name, model string, values, n int) (*Group, error) {
	g := &Group{Rank: rank, j: j}
	ops := make([]worker.Op, values)
	for i := range ops {
		v := j.Held(rank, fmt.Sprint(name, i), model, n)
		g.Values = append(g.Values, v)
		ops[i] = v.Op(units.Declare, 10)
		ops[i].Group = name + "0"
	}
	err := g.do(ops)
	return g, err
}

// Step adds x to every value and reads it, as it is within a superstep, or at its barrier.
func (g *Group) Step(x float32) error {
	engine, name := g.j.Workers[g.Rank].Engine, g.Values[0].Name
	last, err := engine.EndIteration(0, name)
	if err != nil {
		return err
	}
	use := units.Add | units.ReadNow | units.Within
	if last {
		use = units.Add | units.Read
	}
	ops := make([]worker.Op, len(g.Values))
	for i, v := range g.Values {
		ops[i] = v.Op(use, x)
	}
	if err := g.do(ops); err != nil {
		return err
	}
	return engine.BeginIteration(0, name)
}

func (g *Group) do(ops []worker.Op) error {
	done, err := g.j.Submit(g.Rank, ops...)
	if err != nil {
		return err
	}
	for i := range done {
		if _, err := Await(done[i], g.Rank, ops[i].Name); err != nil {
			return err
		}
		g.Values[i].Took(ops[i])
	}
	return nil
}
