package settings

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

const ours = "PACELINE_"

// From is FromEnv with settings that the program gives beside its environment, "sync" for PACELINE_SYNC and so on, as
// texts, numbers or booleans. They replace the variables: they take precedence over synonyms too, have the same
// checks, and have no effect if empty; an unknown one is an error.
func From(env map[string]string, given map[string]any) (Settings, []string, error) {
	if len(given) == 0 {
		return FromEnv(env)
	}
	env = maps.Clone(env)
	if env == nil {
		env = map[string]string{}
	}
	var problems []error
	for _, name := range slices.Sorted(maps.Keys(given)) {
		problems = append(problems, give(env, name, given[name]))
	}
	if err := errors.Join(problems...); err != nil {
		return Settings{}, nil, err
	}
	s, warnings, err := FromEnv(env)
	if err != nil {
		return s, warnings, fmt.Errorf("environment with the settings that init was given: %w", err)
	}
	for name := range given {
		s.From[variable(name)] = "init"
	}
	return s, warnings, nil
}

// give puts a setting into the environment in place of its variable.
func give(env map[string]string, name string, value any) error {
	rows := Table()
	at := slices.IndexFunc(rows, func(r Setting) bool { return r.Name == variable(name) })
	if at < 0 {
		like := nearestOf(variable(strings.TrimPrefix(name, ours)), knownNames())
		return fmt.Errorf("there is no setting %q: did you mean %q?", name, strings.ToLower(strings.TrimPrefix(like, ours)))
	}
	text, err := textOf(value)
	if err != nil {
		return fmt.Errorf("setting %q: %w", name, err)
	}
	env[rows[at].Name] = text
	return nil
}

func variable(name string) string { return ours + strings.ToUpper(name) }

// textOf is a value in the form of a variable.
func textOf(value any) (string, error) {
	switch v := value.(type) {
	case string:
		return v, nil
	case bool:
		if v {
			return "1", nil
		}
		return "0", nil
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64), nil
	}
	return "", fmt.Errorf("%v is not a text, number or boolean", value)
}
