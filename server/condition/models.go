package condition

import (
	"fmt"
	"strings"
)

// Model is a named pair of conditions.
type Model struct {
	Name string // as a setting writes it: "bsp"
	Pull PullCondition
	Push PushCondition
}

// Check reports whether the model can run on a key of dataflow d.
func (m Model) Check(d Dataflow) error {
	if m.Pull == nil || m.Push == nil {
		return fmt.Errorf("synchronisation model %q needs a pull and a push condition", m.Name)
	}
	return checkPull(m.Pull, d)
}

// checkPull refuses pull conditions that would answer with a sum that is not there yet.
func checkPull(c PullCondition, d Dataflow) error {
	if d == Aggregate && c.Ahead() {
		return fmt.Errorf("pull condition %q lets workers run ahead, which an aggregate key cannot serve: declare the tensor as accumulate", c)
	}
	return nil
}

// builder makes a model from the arguments behind its name: "ssp:3" calls ssp's with ["3"].
type builder struct {
	name  string
	build func(args []string) (Model, error)
}

// builders is the table of models. A new model is one file and one line here.
func builders() []builder {
	return []builder{
		{"bsp", newBSP},
	}
}

// Names lists the models that Parse knows.
func Names() []string {
	var names []string
	for _, b := range builders() {
		names = append(names, b.name)
	}
	return names
}

// Parse makes the model that a setting names, with its arguments behind a colon: "bsp".
func Parse(setting string) (Model, error) {
	name, rest, given := strings.Cut(setting, ":")
	var args []string
	if given {
		args = strings.Split(rest, ",")
	}
	for _, b := range builders() {
		if b.name == name {
			return b.build(args)
		}
	}
	return Model{}, fmt.Errorf("unknown synchronisation model %q, known are: %s", setting, strings.Join(Names(), ", "))
}
