package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
)

// toTerminal is --json without a file.
const toTerminal = "-"

// jsonSwitch is the flag --json, the same in every command: alone it prints JSON in place of the text, with a file it
// writes the JSON there and prints the text.
type jsonSwitch struct{ to string }

func (j *jsonSwitch) add(c *cobra.Command) {
	c.Flags().StringVar(&j.to, "json", "", "print the results as JSON; --json=`FILE` writes them to a file beside the text")
	c.Flags().Lookup("json").NoOptDefVal = toTerminal
}

// addAs adds the flag to a command that has more to say about it.
func (j *jsonSwitch) addAs(c *cobra.Command, usage string) {
	j.add(c)
	c.Flags().Lookup("json").Usage = usage
}

// check finds a file that cannot be written, before there is anything to write.
func (j *jsonSwitch) check() error {
	if j.to == "" || j.to == toTerminal {
		return nil
	}
	file, err := os.OpenFile(j.to, os.O_WRONLY|os.O_CREATE, 0o666)
	if err != nil {
		return fmt.Errorf("--json: %w", err)
	}
	return file.Close()
}

// text reports whether the text is printed, because no JSON takes its place.
func (j *jsonSwitch) text() bool { return j.to != toTerminal }

// show writes v where the switch says, and the text unless the JSON is in its place.
func (j *jsonSwitch) show(c *cobra.Command, v any, text func(io.Writer)) error {
	if j.text() {
		text(c.OutOrStdout())
	}
	return j.write(c, v)
}

// write writes v where the switch says.
func (j *jsonSwitch) write(c *cobra.Command, v any) error {
	switch j.to {
	case "":
		return nil
	case toTerminal:
		return printJSON(c.OutOrStdout(), v)
	}
	return writeJSON(j.to, v)
}

// stream opens where the switch says, for one object on each line.
func (j *jsonSwitch) stream(c *cobra.Command) (write func(v any) error, end func() error, err error) {
	switch j.to {
	case "":
		return func(any) error { return nil }, func() error { return nil }, nil
	case toTerminal:
		return json.NewEncoder(c.OutOrStdout()).Encode, func() error { return nil }, nil
	}
	file, err := os.Create(j.to)
	if err != nil {
		return nil, nil, fmt.Errorf("--json: %w", err)
	}
	return json.NewEncoder(file).Encode, file.Close, nil
}

// printJSON writes v as JSON with indentation.
func printJSON(out io.Writer, v any) error {
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func writeJSON(file string, v any) error {
	var b bytes.Buffer
	if err := printJSON(&b, v); err != nil {
		return err
	}
	return os.WriteFile(file, b.Bytes(), 0o666)
}
