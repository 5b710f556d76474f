package condition

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/expr-lang/expr/ast"

	"github.com/paceline/paceline/internal/limits"
)

// grammar is the part of the library's language that an expression may use: numbers, comparisons and
// logic, of kinds known beforehand, so that evaluation ends and does not fail.
type grammar struct{ names []string }

// kind is the type of an expression's value.
type kind string

const (
	logic   kind = "true or false"
	whole   kind = "a whole number"
	decimal kind = "a number"
)

// Operators by what they take.
var (
	arithmetic  = strings.Fields("+ - * / % ** ^")
	comparisons = strings.Fields("< <= > >=")
	equalities  = strings.Fields("== !=")
	logical     = strings.Fields("and && or || not !")
	operators   = slices.Concat(arithmetic, comparisons, equalities, logical)
)

// functions lists the library's functions that an expression may call.
var functions = []string{"min", "max", "abs", "floor", "ceil"}

// kind is the kind of an expression's value, or the reason why it is not allowed.
func (g grammar) kind(node ast.Node) (kind, error) {
	switch n := node.(type) {
	case *ast.IntegerNode:
		return whole, nil
	case *ast.FloatNode:
		return decimal, nil
	case *ast.BoolNode:
		return logic, nil
	case *ast.IdentifierNode:
		return g.identifier(n.Value)
	case *ast.UnaryNode:
		return g.unary(n)
	case *ast.BinaryNode:
		return g.binary(n)
	case *ast.ConditionalNode:
		return g.choice(n)
	case *ast.MemberNode:
		if id, ok := n.Node.(*ast.IdentifierNode); ok && id.Value == "count" && !n.Optional {
			return whole, g.want(whole, n.Property)
		}
	case *ast.BuiltinNode:
		if slices.Contains(functions, n.Name) {
			return g.function(n)
		}
	}
	return "", fmt.Errorf("%s is not part of a condition: allowed are numbers, %s, ?:, the names %s and the functions %s",
		node, strings.Join(operators, " "), g.list(), strings.Join(functions, ", "))
}

func (g grammar) identifier(name string) (kind, error) {
	switch {
	case name == "count":
		return "", fmt.Errorf("count is a number for each iteration: write count[V]")
	case !slices.Contains(g.names, name):
		return "", fmt.Errorf("unknown name %q: allowed are %s", name, g.list())
	case name == "significance":
		return decimal, nil
	}
	return whole, nil
}

func (g grammar) list() string {
	return strings.ReplaceAll(strings.Join(g.names, ", "), "count", "count[i]")
}

func (g grammar) unary(n *ast.UnaryNode) (kind, error) {
	if slices.Contains(logical, n.Operator) {
		return logic, g.want(logic, n.Node)
	}
	return g.number(n.Node)
}

func (g grammar) binary(n *ast.BinaryNode) (kind, error) {
	switch {
	case slices.Contains(logical, n.Operator):
		return logic, g.want(logic, n.Left, n.Right)
	case slices.Contains(equalities, n.Operator):
		_, err := g.alike(n.Left, n.Right)
		return logic, err
	case slices.Contains(comparisons, n.Operator):
		_, err := g.number(n.Left, n.Right)
		return logic, err
	case !slices.Contains(arithmetic, n.Operator):
		return "", fmt.Errorf("the operator %q is not part of a condition: allowed are %s", n.Operator, strings.Join(operators, " "))
	case n.Operator == "/" && !quotients.nonZero(n.Right) || n.Operator == "%" && !remainders.nonZero(n.Right):
		return "", fmt.Errorf("divides by %s, which can be zero: allowed is what never is, as a number, N, V + 1 or max(x, 1)", n.Right)
	case n.Operator == "%":
		return whole, g.want(whole, n.Left, n.Right)
	}
	k, err := g.number(n.Left, n.Right)
	if !slices.Contains([]string{"+", "-", "*"}, n.Operator) {
		k = decimal
	}
	return k, err
}

// choice is a ? b : c.
func (g grammar) choice(n *ast.ConditionalNode) (kind, error) {
	if err := g.want(logic, n.Cond); err != nil {
		return "", err
	}
	return g.alike(n.Exp1, n.Exp2)
}

func (g grammar) function(n *ast.BuiltinNode) (kind, error) {
	k, err := g.number(n.Arguments...)
	if n.Name == "floor" || n.Name == "ceil" {
		k = decimal
	}
	return k, err
}

// want refuses operands of another kind.
func (g grammar) want(k kind, operands ...ast.Node) error {
	for _, n := range operands {
		got, err := g.kind(n)
		if err != nil {
			return err
		}
		if got != k {
			return misfit(n, got, k)
		}
	}
	return nil
}

// number is the kind of an operation on operands, which must be numbers.
func (g grammar) number(operands ...ast.Node) (kind, error) {
	k := whole
	for _, n := range operands {
		got, err := g.kind(n)
		if err != nil {
			return "", err
		}
		switch got {
		case logic:
			return "", misfit(n, got, decimal)
		case decimal:
			k = decimal
		}
	}
	return k, nil
}

// alike is the kind of operands that must be both numbers or both logic.
func (g grammar) alike(a, b ast.Node) (kind, error) {
	left, err := g.kind(a)
	if err != nil {
		return "", err
	}
	right, err := g.kind(b)
	switch {
	case err != nil:
		return "", err
	case left == right:
		return left, nil
	case left == logic || right == logic:
		return "", misfit(b, right, left)
	}
	return decimal, nil
}

func misfit(n ast.Node, got, want kind) error {
	return fmt.Errorf("%s is %s where only %s is allowed", n, got, want)
}

// bounds finds spans of divisors. It is the greatest result of an operation of which something is known.
type bounds float64

const (
	// quotients are decimals: where the divisor has wrapped around to zero they are infinite, and nothing fails.
	quotients bounds = math.MaxFloat64
	// remainders by zero fail: whole numbers of which floats are exact neither wrap around nor hide one in rounding.
	remainders bounds = 1 << 53
)

// nonZero reports whether a divisor can never be zero.
func (b bounds) nonZero(node ast.Node) bool {
	s := b.span(node)
	return s.low > 0 || s.high < 0
}

// span bounds the values of an expression.
type span struct{ low, high float64 }

// anything is the span of what is not known.
var anything = span{math.Inf(-1), math.Inf(1)}

// iterations is more than any job comes to: eight years, with a thousand in a second.
const iterations = 1 << 38

func (b bounds) span(node ast.Node) span {
	switch n := node.(type) {
	case *ast.IntegerNode:
		return span{float64(n.Value), float64(n.Value)}
	case *ast.FloatNode:
		return span{n.Value, n.Value}
	case *ast.IdentifierNode:
		return nameSpan(n.Value)
	case *ast.MemberNode: // count[i]
		return span{0, limits.MaxRanks}
	case *ast.UnaryNode:
		if s := b.span(n.Node); n.Operator == "-" {
			return span{-s.high, -s.low}
		}
	case *ast.BinaryNode:
		return b.operation(n.Operator, b.span(n.Left), b.span(n.Right))
	case *ast.BuiltinNode:
		return b.function(n)
	}
	return anything
}

func nameSpan(name string) span {
	switch name {
	case "N":
		return span{1, limits.MaxRanks}
	case "progress", "V", "fastest", "slowest":
		return span{0, iterations}
	case "lead":
		return span{-iterations, iterations}
	}
	return anything
}

func (b bounds) operation(operator string, left, right span) span {
	s := anything
	switch {
	case !b.hold(left) || !b.hold(right):
	case operator == "+":
		s = span{left.low + right.low, left.high + right.high}
	case operator == "-":
		s = span{left.low - right.high, left.high - right.low}
	case operator == "*" && left.low >= 0 && right.low >= 0:
		s = span{left.low * right.low, left.high * right.high}
	}
	if !b.hold(s) {
		return anything
	}
	return s
}

func (b bounds) hold(s span) bool { return s.low >= -float64(b) && s.high <= float64(b) } // of no number, neither

func (b bounds) function(n *ast.BuiltinNode) span {
	if len(n.Arguments) == 0 {
		return anything
	}
	low, high := make([]float64, len(n.Arguments)), make([]float64, len(n.Arguments))
	for i, a := range n.Arguments {
		s := b.span(a)
		low[i], high[i] = s.low, s.high
	}
	switch n.Name {
	case "max":
		return span{slices.Max(low), slices.Max(high)}
	case "min":
		return span{slices.Min(low), slices.Min(high)}
	case "abs":
		return span{max(low[0], 0), max(high[0], -low[0])}
	}
	return anything
}
