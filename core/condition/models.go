package condition

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/nearest"
	"github.com/paceline/paceline/internal/setting"
)

// Model is a named pair of conditions.
type Model struct {
	Name string // as a setting writes it, so that Parse makes the same model of it: "ssp:3"
	Pull PullCondition
	Push PushCondition

	// Dataflow is the default of a tensor under the model. A model that lets workers run ahead needs Accumulate,
	// whatever the value.
	Dataflow Dataflow
	// Tuner moves the pull condition while training runs; nil if it is fixed.
	Tuner Tuner
	// Supersteps decides when a barrier is due; nil if every iteration is a superstep of its own.
	Supersteps Supersteps
}

// Check reports whether the model can run on a key of dataflow d.
func (m Model) Check(d Dataflow) error {
	if m.Push == nil {
		return fmt.Errorf("synchronisation model %q needs a pull and a push condition", m.Name)
	}
	if m.Tuner != nil && d == Aggregate {
		return fmt.Errorf("synchronisation model %s lets workers run ahead, which an aggregate key cannot serve: declare the tensor as accumulate", m.Name)
	}
	if m.Supersteps != nil && d == Aggregate {
		return fmt.Errorf("synchronisation model %s lets workers run freely up to a barrier, which an aggregate key cannot serve: declare the tensor as accumulate", m.Name)
	}
	return checkPull(m.Pull, d)
}

// CheckSetting reports whether this number of workers can run the model that a setting names, BSP if empty, on a tensor
// that is reduced or held by the servers.
func CheckSetting(text string, softPark bool, d Dataflow, workers int) error {
	m := BSP()
	if text != "" {
		var err error
		if m, err = Parse(text); err != nil {
			return err
		}
	}
	if softPark && d == Aggregate {
		return errors.New("soft-barrier parking answers before an iteration is closed, which a reduction cannot serve: use lazy parking")
	}
	if err := m.Check(d); err != nil {
		return err
	}
	return m.CheckWorkers(workers)
}

// CheckWorkers reports whether the model can run with n workers. It applies to the start, when all of
// them are present; a machine continues with the live ones.
func (m Model) CheckWorkers(n int) error { return checkPush(m.Push, n) }

// Sized is a condition that needs a number of workers, as drop-stragglers' Nt of them.
type Sized interface{ CheckWorkers(n int) error }

// checkPull refuses pull conditions that would answer with an incomplete sum.
func checkPull(c PullCondition, d Dataflow) error {
	if c == nil {
		return errors.New("the pull condition is missing")
	}
	if d == Aggregate && c.Ahead() {
		return fmt.Errorf("pull condition %q lets workers run ahead, which an aggregate key cannot serve: declare the tensor as accumulate", c)
	}
	return nil
}

// checkPush refuses push conditions that n workers cannot satisfy.
func checkPush(c PushCondition, n int) error {
	if c == nil {
		return errors.New("the push condition is missing")
	}
	if sized, ok := c.(Sized); ok {
		return sized.CheckWorkers(n)
	}
	return nil
}

// A builder makes a model from the arguments behind its name: "ssp:3" calls ssp's with "3".
type builder struct {
	usage string // the name, a colon and the arguments
	build func(*Arguments) (Model, error)
}

func (b builder) name() string {
	name, _, _ := strings.Cut(b.usage, ":")
	return name
}

// builders is the table of models. A new model is one file and one line here, or one call of Register. The tests want a
// setting of it in models_test.go; random schedules run the models in random_test.go.
var builders = []builder{
	{"bsp", newBSP},
	{"asp", newASP},
	{"ssp:S", newSSP},
	{"dsps:LOW,HIGH", newDSPS},
	{"drop-stragglers:NT", newDropStragglers},
	{"pssp:S,C,SEED", newPSSP},
	{"dynamic-pssp:S,ALPHA,SEED", newDynamicPSSP},
	{"adaptive:S,W", newAdaptive},
	{"elastic:R", newElastic},
	{"expression:PULL;PUSH", newExpression},
}

// Register adds a model to those of Parse: usage is its form in a setting, "ssp:S", and build makes it of the
// arguments. Call it from the init function of a package that every process of the job imports. It panics if the
// name is in use.
func Register(usage string, build func(*Arguments) (Model, error)) {
	b := builder{usage, build}
	if slices.Contains(Names(), b.name()) {
		panic(fmt.Sprintf("condition: the synchronisation model %q is registered twice", b.name()))
	}
	builders = append(builders, b)
}

// Names lists the models that Parse knows.
func Names() []string { return each.Of(builders, builder.name) }

// Parse makes the model that a setting names, with its arguments behind a colon: "bsp", "ssp:3",
// "pssp:3,0.5". Each model's file describes its arguments.
func Parse(text string) (Model, error) {
	name, _, _ := strings.Cut(text, ":")
	for _, b := range builders {
		if b.name() == name {
			return b.build(&Arguments{setting.Read("synchronisation model", text, b.usage)})
		}
	}
	return Model{}, fmt.Errorf("unknown synchronisation model %q, %s", text, nearest.Known(name, Names()))
}
