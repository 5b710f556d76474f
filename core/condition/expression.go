package condition

import (
	"errors"
	"fmt"
	"strings"

	"github.com/expr-lang/expr"
	"github.com/expr-lang/expr/ast"
	"github.com/expr-lang/expr/file"
	"github.com/expr-lang/expr/parser"
	"github.com/expr-lang/expr/vm"
)

// Names that an expression may use. All but lead and significance are never negative, and lead is
// progress - V. Whether an iteration is closed cannot depend on the rank that asks, so a push
// condition has no names for that.
var (
	pushNames = []string{"V", "N", "count", "fastest", "slowest"}
	pullNames = append([]string{"progress", "lead", "significance"}, pushNames...)
)

// maxExpression bounds an expression's text, in bytes.
const maxExpression = 1000

// ExpressionModel is a model whose conditions are given as expressions; an empty one is BSP's. The
// setting is "expression:PULL;PUSH" or "expression:PULL".
func ExpressionModel(pull, push string) (Model, error) {
	m := Model{Name: "expression:" + pull, Pull: Closed{}, Push: EveryLive{}, Dataflow: Accumulate}
	if push != "" {
		m.Name += ";" + push
	}
	var err error
	if strings.TrimSpace(pull) != "" {
		if m.Pull, err = ParsePull(pull); err != nil {
			return Model{}, err
		}
	}
	if strings.TrimSpace(push) != "" {
		if m.Push, err = ParsePush(push); err != nil {
			return Model{}, err
		}
	}
	return m, nil
}

func newExpression(a *Arguments) (Model, error) {
	text := a.Rest()
	if strings.Trim(text, "; ") == "" {
		a.Fail("PULL and PUSH are missing")
		return a.End(Model{})
	}
	pull, push, _ := strings.Cut(text, ";")
	return ExpressionModel(pull, push)
}

// ParsePull makes a pull condition of an expression such as "progress < V + 3 || significance < 0.01".
// A pull of a closed iteration is always answered: nothing would wake it later.
func ParsePull(text string) (PullCondition, error) {
	p, err := compile(text, pullNames)
	if err != nil {
		return nil, fmt.Errorf("pull condition %q: %w", text, err)
	}
	return pullExpression{expression{text, p}}, nil
}

// ParsePush makes a push condition of an expression such as "count[V] >= 0.9*N". An iteration that
// every live rank has pushed is always closed: nothing would close it later.
func ParsePush(text string) (PushCondition, error) {
	p, err := compile(text, pushNames)
	if err != nil {
		return nil, fmt.Errorf("push condition %q: %w", text, err)
	}
	return pushExpression{expression{text, p}}, nil
}

type pullExpression struct{ expression }

func (c pullExpression) Holds(v View) bool { return v.Progress < v.V || c.value(v) }
func (c pullExpression) Ahead() bool       { return true }

// AsksSignificance implements Significant: no other name has the word in it.
func (c pullExpression) AsksSignificance() bool { return strings.Contains(c.text, "significance") }

type pushExpression struct{ expression }

func (c pushExpression) Holds(v View) bool { return v.Count(v.V) == v.N || c.value(v) }

// expression is a compiled expression. After compilation its evaluation cannot fail.
type expression struct {
	text    string
	program *vm.Program
}

func (e expression) String() string { return e.text }

func (e expression) value(v View) bool {
	holds, err := run(e.program, v)
	return err == nil && holds
}

func run(program *vm.Program, v View) (bool, error) {
	value, err := expr.Run(program, environment{
		Progress: int(v.Progress), Lead: int(v.Progress - v.V), Significance: float64(v.Significance),
		V: int(v.V), N: max(v.N, 1), Fastest: int(v.Fastest), Slowest: int(v.Slowest),
		Count: func(i int) int { return v.Count(uint64(i)) },
	})
	if err != nil {
		return false, err
	}
	return value.(bool), nil
}

// environment gives the values of an expression's names.
type environment struct {
	Progress     int           `expr:"progress"`
	Lead         int           `expr:"lead"`
	Significance float64       `expr:"significance"`
	V            int           `expr:"V"`
	N            int           `expr:"N"`
	Fastest      int           `expr:"fastest"`
	Slowest      int           `expr:"slowest"`
	Count        func(int) int `expr:"count"`
}

// compile checks an expression and makes a program of it that cannot fail, whatever the view.
func compile(text string, names []string) (*vm.Program, error) {
	if len(text) > maxExpression {
		return nil, fmt.Errorf("is %d bytes long, allowed are %d", len(text), maxExpression)
	}
	options := []expr.Option{expr.Env(environment{}), expr.AsBool(), expr.DisableAllBuiltins(), expr.Patch(countCalls{})}
	for _, f := range functions {
		options = append(options, expr.EnableBuiltin(f))
	}
	tree, err := parser.Parse(text) // parsed alone first: the library's own checks admit more than a condition may use
	if err != nil {
		return nil, oneLine(err)
	}
	if kind, err := (grammar{names}).kind(tree.Node); err != nil {
		return nil, err
	} else if kind != logic {
		return nil, fmt.Errorf("is %s, %s", kind, allowed)
	}
	program, err := expr.Compile(text, options...)
	if err != nil {
		return nil, oneLine(err)
	}
	return program, nil
}

const allowed = "allowed is a comparison such as lead < 3 or count[V] >= N - 1"

// oneLine is the library's error without its drawing of the position.
func oneLine(err error) error {
	var e *file.Error
	if errors.As(err, &e) && e.Snippet != "" {
		return fmt.Errorf("column %d: %s: %s", e.Column+1, e.Message, allowed)
	}
	return fmt.Errorf("%w: %s", err, allowed)
}

// countCalls turns count[i], the papers' notation, into a call.
type countCalls struct{}

// Visit implements ast.Visitor.
func (countCalls) Visit(node *ast.Node) {
	if m, ok := (*node).(*ast.MemberNode); ok {
		ast.Patch(node, &ast.CallNode{Callee: m.Node, Arguments: []ast.Node{m.Property}})
	}
}
