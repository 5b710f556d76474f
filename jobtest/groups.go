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
		v.Group = name + "0"
		g.Values = append(g.Values, v)
		ops[i] = v.Op(units.Declare, 10)
	}
	err := g.do(ops)
	return g, err
}

// Step adds x to every value and reads it, as it is within a superstep, or at its barrier.
func (g *Group) Step(x float32) error {
	use, err := g.Values[0].ends()
	if err != nil {
		return err
	}
	ops := make([]worker.Op, len(g.Values))
	for i, v := range g.Values {
		ops[i] = v.Op(use, x)
	}
	if err := g.do(ops); err != nil {
		return err
	}
	return g.Values[0].begins()
}

// Step adds x to a value and reads it; where it is in a group, which is its own, as it is within a superstep, or at its barrier.
func (v *Held) Step(x float32) error {
	if v.Group == "" {
		return v.Use(units.Add|units.Read, x)
	}
	use, err := v.ends()
	if err == nil {
		err = v.Use(use, x)
	}
	if err == nil {
		err = v.begins()
	}
	return err
}

// ends ends an iteration, and says how its values are used then: within a superstep, or at its barrier.
func (v *Held) ends() (units.Use, error) {
	last, err := v.j.Workers[v.Rank].Engine.EndIteration(0, v.Group)
	if last {
		return units.Add | units.Read, err
	}
	return units.Add | units.ReadNow | units.Within, err
}

func (v *Held) begins() error { return v.j.Workers[v.Rank].Engine.BeginIteration(0, v.Group) }

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
