package condition

import (
	"fmt"
	"strconv"
	"strings"
)

// Arguments are the part of a setting behind a model's name. Getters read them one by one; the first faulty one
// is the error, and values read after it are undefined.
type Arguments struct {
	setting, usage string // "ssp:3" and "ssp:S"
	text           string // behind the colon
	given          bool   // whether there is a colon
	err            error
}

// Whole reads a whole number from least to most.
func (a *Arguments) Whole(name string, least, most uint64) uint64 {
	word := a.next(name)
	if a.err != nil {
		return 0
	}
	n, err := strconv.ParseUint(word, 10, 64)
	if err != nil || n < least || n > most {
		a.Fail("%s is %q, allowed is a whole number from %d to %d", name, word, least, most)
	}
	return n
}

// Iterations reads a number of iterations: a lead, or a distance between barriers.
func (a *Arguments) Iterations(name string, least uint64) uint64 {
	return a.Whole(name, least, MaxLead-1)
}

// Probability reads a number from 0 to 1.
func (a *Arguments) Probability(name string) float64 {
	word := a.next(name)
	if a.err != nil {
		return 0
	}
	p, err := strconv.ParseFloat(word, 64)
	if err != nil || !(p >= 0 && p <= 1) {
		a.Fail("%s is %q, allowed is a number from 0 to 1", name, word)
	}
	return p
}

// More reports whether another argument follows.
func (a *Arguments) More() bool { return a.given && a.err == nil }

// next reads an argument unchanged.
func (a *Arguments) next(name string) (word string) {
	if !a.More() {
		a.Fail("%s is missing", name)
		return ""
	}
	word, a.text, a.given = strings.Cut(a.text, ",")
	return strings.TrimSpace(word)
}

// Word consumes the next argument if it is this word.
func (a *Arguments) Word(word string) bool {
	first, rest, more := strings.Cut(a.text, ",")
	if !a.More() || strings.TrimSpace(first) != word {
		return false
	}
	a.text, a.given = rest, more
	return true
}

// Fail records an error of the arguments, unless there is one already.
func (a *Arguments) Fail(format string, values ...any) {
	if a.err == nil {
		a.err = fmt.Errorf("synchronisation model %q: %s (it is written %s)", a.setting, fmt.Sprintf(format, values...), a.usage)
	}
}

// End is m, or the error of a faulty or superfluous argument.
func (a *Arguments) End(m Model) (Model, error) {
	if a.More() {
		a.Fail("takes no argument %q", a.text)
	}
	if a.err != nil {
		return Model{}, a.err
	}
	return m, nil
}
