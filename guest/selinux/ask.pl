# What a shell can't ask the kernel; perl alone, without its modules.
#
#   ask.pl label LABEL FILE...          gives files a label
#   ask.pl label-of FILE                prints a file's
#   ask.pl peer SOCKET [LABEL]          connects, by a socket with this label; prints that of the one that listens
#   ask.pl next exec LABEL COMMAND...   becomes the command, with this label
#   ask.pl monitor SOCKET COMMAND       prints what a QEMU says to a command
sub GETXATTR { 191 }
sub SETXATTR { 188 }
sub AF_UNIX { 1 }
sub SOCK_STREAM { 1 }
sub SOL_SOCKET { 1 }
sub SO_PEERSEC { 31 }

$| = 1;
my ($verb, @rest) = @ARGV;

sub choose {
    my ($what, $label) = @_;
    open(my $file, "+<", "/proc/thread-self/attr/$what") or die "$what: $!\n";
    syswrite($file, $label) or die "$what: $label: $!\n";
}

sub connected {
    socket(my $socket, AF_UNIX, SOCK_STREAM, 0) or die "socket: $!\n";
    connect($socket, pack("S a*", AF_UNIX, $_[0])) or die "connect: $!\n";
    return $socket;
}

my $name = "security.selinux";
if ($verb eq "label") {
    my $label = shift(@rest) . "\0";
    for my $file (@rest) {
        syscall(SETXATTR, $file, $name, $label, length $label, 0) == 0 or die "$file: $!\n";
    }
} elsif ($verb eq "label-of") {
    my $label = "\0" x 300;
    my $length = syscall(GETXATTR, $rest[0], $name, $label, length $label);
    $length >= 0 or die "$rest[0]: $!\n";
    print substr($label, 0, $length) =~ s/\0//gr, "\n";
} elsif ($verb eq "peer") {
    choose("sockcreate", $rest[1]) if $rest[1];
    print getsockopt(connected($rest[0]), SOL_SOCKET, SO_PEERSEC) =~ s/\0//gr, "\n";
} elsif ($verb eq "next") {
    my ($what, $label, @command) = @rest;
    choose($what, $label);
    exec(@command) or die "$command[0]: $!\n";
} elsif ($verb eq "monitor") {
    my ($path, $command) = @rest;
    # QEMU's end gets the categories of this one, and QEMU may read it only if it has them.
    choose("sockcreate", "system_u:system_r:virtd_t:s0");
    my $socket = connected($path);
    my $hear = sub {
        my $heard = "";
        while ($heard !~ /\(qemu\) $/) { sysread($socket, $heard, 4096, length $heard) or last; }
        return $heard;
    };
    $hear->();
    syswrite($socket, "$command\n");
    # The line that was typed comes back, letter by letter, and then the answer.
    my $answer = $hear->() =~ s/\r//gr =~ s/^[^\n]*\n//r =~ s/\(qemu\) $//r;
    print $answer;
}
